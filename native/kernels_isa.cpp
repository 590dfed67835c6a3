// Compiled once per instruction set, with PT_ISA naming it: baseline, v3 or v4.
//
// Nothing in here may have external linkage but the table at the end: of two equal inline functions the linker keeps
// one, and it might keep the one that the machine cannot run. Hence the unnamed namespace, and no standard library.
#include "codes_dense.h"
#include "codes_drawn.h"
#include "codes_sparse.h"
#include "kernels.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

// An out may be a source, but only the very same elements: no iteration waits for another.
#ifdef __clang__
#define PT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PT_INDEPENDENT _Pragma("GCC ivdep")
#endif
#define PT_EACH(i, count) PT_INDEPENDENT for (int64_t i = 0; i < (count); ++i)
#define PT_NAME_OF(isa) PT_QUOTED(isa)
#define PT_QUOTED(isa) #isa

namespace pt {
namespace PT_ISA {
namespace {

// A T at any address, whatever else the memory is.
template <class T> struct At {
    typedef T type __attribute__((aligned(1), may_alias));
};
template <class T> using Loose = typename At<T>::type;

#include "half.inc"
#include "reduce.inc"
#include "many.inc"
void copy_past_caches(void* out, const void* source, int64_t num_bytes);

#include "update.inc"
#include "layer_wise.inc"
#include "finite.inc"

// -fno-tree-loop-distribute-patterns keeps the compiler from making a call of memcpy out of it.
void copy(void* out, const void* source, int64_t num_bytes) {
    auto into = static_cast<Loose<uint64_t>*>(out);
    auto from = static_cast<const Loose<uint64_t>*>(source);
    PT_EACH(i, num_bytes / 8) into[i] = from[i];
    for (int64_t i = num_bytes / 8 * 8; i < num_bytes; ++i)
        static_cast<uint8_t*>(out)[i] = static_cast<const uint8_t*>(source)[i];
}

#if defined(__AVX512F__)
typedef __m512i Line;
void stream(Line* out, const Line* source) { _mm512_stream_si512(out, _mm512_loadu_si512(source)); }
#elif defined(__AVX__)
typedef __m256i Line;
void stream(Line* out, const Line* source) { _mm256_stream_si256(out, _mm256_loadu_si256(source)); }
#elif defined(__SSE2__)
typedef __m128i Line;
void stream(Line* out, const Line* source) { _mm_stream_si128(out, _mm_loadu_si128(source)); }
#endif

// Whole lines past the caches; `out` is where a line begins. In no order with other stores until `streamed`.
void stream_lines(void* out, const void* source, int64_t num_bytes) {
#ifdef __SSE2__
    for (int64_t done = 0; done < num_bytes; done += int64_t(sizeof(Line)))
        stream(
            reinterpret_cast<Line*>(static_cast<char*>(out) + done),
            reinterpret_cast<const Line*>(static_cast<const char*>(source) + done));
#else
    copy(out, source, num_bytes);
#endif
}

void streamed() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

void copy_past_caches(void* out, const void* source, int64_t num_bytes) {
#ifdef __SSE2__
    constexpr int64_t LINE = sizeof(Line);
    auto into = static_cast<char*>(out);
    auto from = static_cast<const char*>(source);
    int64_t done = (LINE - reinterpret_cast<uintptr_t>(into) % LINE) % LINE; // streams begin where a line does
    if (done > num_bytes) done = num_bytes;
    copy(into, from, done);
    int64_t lines = (num_bytes - done) / LINE * LINE;
    stream_lines(into + done, from + done, lines);
    copy(into + done + lines, from + done + lines, num_bytes - done - lines);
    streamed();
#else
    copy(out, source, num_bytes);
#endif
}

#include "descend.inc"

#include "codes_dense.inc"
#include "codes_sparse.inc"
#include "codes_drawn.inc"

const DenseCodes dense_codes = dense::CODES;
const SparseCodes sparse_codes = {sparse::count_over, sparse::gather_over, sparse::histogram_of,
                                  sparse::pack_list,  sparse::pack_map,    sparse::accumulate};
const DrawnCodes drawn_codes = drawn::CODES;

} // namespace

extern const Kernels kernels = {
    PT_NAME_OF(PT_ISA), reduce, copy, copy_past_caches, update<float>, update<double>, unfinite, descend<float>,
    descend<double>, squares<float>, squares<double>, lamb_direction<float>, lamb_direction<double>, &dense_codes, &sparse_codes, &drawn_codes};

} // namespace PT_ISA
} // namespace pt
