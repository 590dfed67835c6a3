// The C interface of codes_sparse.h, with the instruction set in use; and what needs none: which k of many.
#include "codes_sparse.h"

#include <algorithm>
#include <cstring>

#include "codes_sparse_abi.h"
#include "kernels.h"

namespace pt {
namespace {

constexpr uint32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;
constexpr int64_t SAMPLES = 1 << 16; // looked at for a first guess; fewer elements than four times this need no guess

const SparseCodes& codes() { return *kernels_in_use().sparse; }

uint32_t bits_of(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}

template <class T> T at(const void* data, int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const char*>(data) + i * int64_t(sizeof(T)), sizeof(T));
    return value;
}

template <class T> void put(void* data, int64_t i, T value) {
    std::memcpy(static_cast<char*>(data) + i * int64_t(sizeof(T)), &value, sizeof(T));
}

void plus(void* out, int64_t i, float value) { put<float>(out, i, at<float>(out, i) + value); }

SparseSource source_of(const pt_sparse_source& s) {
    return {
        static_cast<const float*>(s.x), static_cast<const float*>(s.r), static_cast<const float*>(s.u), s.momentum,
        s.scale};
}

float value_at(const SparseSource& s, int64_t i) {
    float x = at<float>(s.x, i);
    if (s.u) return at<float>(s.r, i) + (s.momentum * at<float>(s.u, i) + s.scale * x);
    return s.r ? x + at<float>(s.r, i) : x;
}

// The k-th largest of 31-bit numbers, digit by digit from the highest: 11 bits, 10, 10. `fill` counts into bins those
// that begin with the digits found so far. Returns it, and how many of those that are equal to it are among the k.
struct Kth {
    uint32_t bits;
    int64_t num_ties;
};

template <class Fill> Kth kth_largest(int64_t k, Fill fill) {
    constexpr int SHIFTS[] = {20, 10, 0};
    int64_t bins[HISTOGRAM_BINS];
    uint32_t found = 0;
    for (int shift : SHIFTS) {
        int64_t num_bins = shift == 20 ? HISTOGRAM_BINS : 1024, digit = num_bins - 1;
        std::fill(bins, bins + num_bins, 0);
        if (!fill(shift, num_bins, found, bins)) return {0, 0};
        for (; digit > 0 && bins[digit] < k; --digit) k -= bins[digit];
        found = found * uint32_t(num_bins) + uint32_t(digit);
    }
    return {found, k};
}

// The same of `count` numbers in memory, by magnitude.
Kth kth_largest(const void* values, int64_t count, int64_t k) {
    return kth_largest(k, [values, count](int shift, int64_t num_bins, uint32_t prefix, int64_t* bins) {
        int above = shift + (shift == 20 ? 11 : 10);
        for (int64_t i = 0; i < count; ++i) {
            uint32_t bits = at<uint32_t>(values, i) & MAGNITUDE;
            bins[(bits >> shift) & uint32_t(num_bins - 1)] += (bits >> above) == prefix;
        }
        return true;
    });
}

// A bound that a little more than k elements are over, most likely: from every (n / SAMPLES)-th element. With m of the
// samples among the k, their number is off by √m; three times that, and 4, are added.
int32_t guessed_bound(const SparseSource& source, int64_t n, int64_t k, void* scratch, int64_t room) {
    int64_t stride = n / std::min(SAMPLES, room) | 1, count = 0;
    for (int64_t i = stride / 2; i < n && count < room; i += stride) put<float>(scratch, count++, value_at(source, i));
    int64_t expected = k * count / n, more = 4, root = 0;
    while (root * root < expected) ++root;
    int64_t rank = std::min(expected + 3 * root + more, count);
    return int32_t(std::min(kth_largest(scratch, count, rank).bits, INFINITE)) - 1;
}

// Of `count` candidates the k largest, in the order that they have.
void take(const void* candidates, const void* magnitudes, int64_t count, int64_t k, void* indices, void* values) {
    Kth kth = kth_largest(magnitudes, count, k);
    for (int64_t i = 0, taken = 0; i < count && taken < k; ++i) {
        float value = at<float>(magnitudes, i);
        uint32_t bits = bits_of(value) & MAGNITUDE;
        put<uint32_t>(indices, taken, at<uint32_t>(candidates, i));
        put<float>(values, taken, value);
        taken += bits > kth.bits || (bits == kth.bits && kth.num_ties-- > 0);
    }
}

// Without a guess: three passes find the k-th largest exactly, a fourth collects.
void take_exactly(const SparseSource& source, int64_t n, int64_t k, void* indices, void* values, int64_t* bad) {
    Kth kth = kth_largest(k, [&](int shift, int64_t num_bins, uint32_t prefix, int64_t* bins) {
        return (*bad = codes().histogram(source, shift, num_bins, prefix, n, bins)) < 0;
    });
    if (*bad >= 0) return;
    SparseWanted wanted{int32_t(kth.bits) - 1, int32_t(kth.bits), kth.num_ties};
    codes().gather(source, wanted, n, static_cast<uint32_t*>(indices), static_cast<float*>(values), k, bad);
}

int32_t add_map(void* out, int64_t n, const void* words, int64_t num_words, float tau) {
    if (num_words != (n + 15) / 16) return 1;
    uint32_t wrong = 0;
    for (int64_t j = 0; j < num_words; ++j) wrong |= (at<uint32_t>(words, j) & 0xffff) & at<uint32_t>(words, j) >> 16;
    uint32_t past = n % 16 ? 0xffffu << n % 16 & 0xffff : 0;
    if (num_words) wrong |= at<uint32_t>(words, num_words - 1) & (past | past << 16);
    if (wrong) return 1;
    for (int64_t j = 0; j < num_words; ++j)
        for (uint32_t word = at<uint32_t>(words, j); word; word &= word - 1) {
            int bit = __builtin_ctz(word);
            plus(out, 16 * j + bit % 16, bit < 16 ? tau : -tau);
        }
    return 0;
}

bool all_below(const void* indices, int64_t count, uint32_t mask, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, at<uint32_t>(indices, i) & mask);
    return count == 0 || int64_t(largest) < n;
}

} // namespace
} // namespace pt

int64_t pt_sparse_count(const pt_sparse_source* source, float cut, int64_t n, int64_t* bad) {
    *bad = -1;
    return pt::codes().count_over(pt::source_of(*source), int32_t(pt::bits_of(cut)), n, bad);
}

int64_t pt_sparse_above(
    const pt_sparse_source* source, float cut, int64_t n, void* indices, void* values, int64_t room, int64_t* bad) {
    *bad = -1;
    int32_t bound = int32_t(std::max(std::min(pt::bits_of(cut) & pt::MAGNITUDE, pt::INFINITE), 1u)) - 1;
    pt::SparseWanted wanted{bound, -1, 0};
    return pt::codes().gather(
        pt::source_of(*source), wanted, n, static_cast<uint32_t*>(indices), static_cast<float*>(values), room, bad);
}

void pt_sparse_top(
    const pt_sparse_source* source, int64_t n, int64_t k, void* indices, void* values, void* scratch, int64_t room,
    int64_t* bad) {
    *bad = -1;
    auto from = pt::source_of(*source);
    if (n >= 4 * pt::SAMPLES && room > k) {
        pt::SparseWanted wanted{pt::guessed_bound(from, n, k, scratch, room), -1, 0};
        auto candidates = static_cast<uint32_t*>(scratch);
        auto magnitudes = reinterpret_cast<float*>(candidates + room);
        int64_t count = pt::codes().gather(from, wanted, n, candidates, magnitudes, room, bad);
        if (*bad >= 0) return;
        if (k <= count && count <= room) return pt::take(candidates, magnitudes, count, k, indices, values);
    }
    pt::take_exactly(from, n, k, indices, values, bad);
}

void pt_sparse_chunk_top(
    const void* values, int64_t num_chunks, int64_t size, int64_t k, void* indices, void* chosen) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        auto first = static_cast<const char*>(values) + chunk * size * int64_t(sizeof(float));
        pt::Kth kth = pt::kth_largest(first, size, k);
        int64_t taken = chunk * k, end = taken + k;
        for (int64_t i = 0; i < size && taken < end; ++i) {
            float value = pt::at<float>(first, i);
            uint32_t bits = pt::bits_of(value) & pt::MAGNITUDE;
            pt::put<int64_t>(indices, taken, i);
            pt::put<float>(chosen, taken, value);
            taken += bits > kth.bits || (bits == kth.bits && kth.num_ties-- > 0);
        }
    }
}

void pt_threshold_pack(const void* x, void* r, float tau, int64_t n, int32_t is_map, void* words) {
    (is_map ? pt::codes().pack_map : pt::codes().pack_list)(
        static_cast<const float*>(x), static_cast<float*>(r), tau, n, static_cast<uint32_t*>(words));
}

int32_t pt_threshold_add(void* out, int64_t n, const void* words, int64_t num_words, float tau, int32_t is_map) {
    if (is_map) return pt::add_map(out, n, words, num_words, tau);
    if (!pt::all_below(words, num_words, pt::MAGNITUDE, n)) return 1;
    for (int64_t i = 0; i < num_words; ++i) {
        uint32_t word = pt::at<uint32_t>(words, i);
        pt::plus(out, word & pt::MAGNITUDE, word > pt::MAGNITUDE ? -tau : tau);
    }
    return 0;
}

int32_t pt_sparse_add(void* out, int64_t n, const void* indices, const void* values, int64_t count) {
    if (!pt::all_below(indices, count, ~0u, n)) return 1;
    for (int64_t i = 0; i < count; ++i) pt::plus(out, pt::at<uint32_t>(indices, i), pt::at<float>(values, i));
    return 0;
}

void pt_sparse_zero(void* data, const void* indices, int64_t count) {
    for (int64_t i = 0; i < count; ++i) pt::put<float>(data, pt::at<uint32_t>(indices, i), 0.0f);
}

void pt_sparse_accumulate(const void* x, void* u, void* v, float momentum, float scale, int64_t n) {
    pt::codes().accumulate(
        momentum, scale, static_cast<const float*>(x), static_cast<float*>(u), static_cast<float*>(v), n);
}
