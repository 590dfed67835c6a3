// The collectives. K is a rank's data in bytes, N the number of ranks.
//
// All-reduce, staged: a pipeline over blocks, with one meeting a block. Slice s of a block is rank s's to reduce.
//
//   turn t     copy block t's other slices in │ reduce own slice of block t-1 │ copy the others' results of t-2 out
//   ── meet ──────────────────────────────────────────────────────────────────────────────────────────────────────
//   a rank moves K(N-1)/N in, reads K and writes 2K/N when it reduces, and moves K(N-1)/N out
//
// Two ranks, staged: each copies whole blocks in, and adds the other's block to its own while that is still in the
// cache. Small data: the same with one block, for any N. Direct (all data in arenas): meet, reduce own slice of
// everybody's data in place, meet.
#include <algorithm>
#include <cstring>

#include "group.h"
#include "kernels.h"
#include "polytempo.h"

namespace pt {

constexpr int64_t SMALL_BYTES = 16 << 10; // up to here everybody reduces everything: one meeting instead of two

int64_t deadline_after(double timeout_s) { return now_ns() + static_cast<int64_t>(std::min(timeout_s, 1e9) * 1e9); }

struct Span {
    int64_t begin, count;
};

// Slice `index` of `count` elements, in whole cache lines so that no line has two writers.
static Span slice(int64_t count, int size, int index, int64_t element_bytes) {
    const int64_t line = std::max<int64_t>(1, 64 / element_bytes);
    const int64_t each = ((count + size - 1) / size + line - 1) / line * line;
    const int64_t begin = std::min(count, each * index);
    return {begin, std::min(count, begin + each) - begin};
}

static Status meet_and_agree(Group& group, int64_t deadline_ns) {
    const Status status = meet(group, deadline_ns);
    return status == FINE ? agree(group) : status;
}

// ---------------------------------------------------------------------------------------------- all-reduce, reduce

struct AllReduce {
    Group& group;
    DType dtype;
    Op op;
    Order order;
    int root; // -1: every rank
    char* data;
    int64_t count;
    int64_t form;
    int64_t deadline_ns;

    int64_t element_bytes = static_cast<int64_t>(bytes_of(dtype));
    // Elements of a block: as many whole cache lines for every rank as fit into a slot.
    int64_t block = group.block_bytes / (64 * group.size) * (64 * group.size) / element_bytes;
    int64_t num_blocks = (count + block - 1) / block;
    uint64_t base = group.turn + 1; // the turn of block 0

    bool wants() const { return root < 0 || root == group.rank; }
    bool whole() const { return group.size == 2 || num_bytes() <= std::min(SMALL_BYTES, group.block_bytes); }
    int64_t num_bytes() const { return count * element_bytes; }
    char* at(int64_t index) const { return data + index * block * element_bytes; }
    int64_t count_of(int64_t index) const { return std::min(block, count - index * block); }
    Span slice_of(int64_t index, int rank) const { return slice(count_of(index), group.size, rank, element_bytes); }

    void copy_in(int64_t index) const {
        char* in = group.in(group.rank, base + index);
        if (whole()) {
            copy(in, at(index), count_of(index) * element_bytes);
            return;
        }
        const Span own = slice_of(index, group.rank);
        const int64_t before = own.begin * element_bytes, after = (own.begin + own.count) * element_bytes;
        copy(in, at(index), before);
        copy(in + after, at(index) + after, count_of(index) * element_bytes - after);
    }

    void reduce_whole(int64_t index) const {
        if (!wants()) return;
        const void* sources[MAX_RANKS];
        for (int rank = 0; rank < group.size; ++rank) sources[rank] = group.in(rank, base + index);
        sources[group.rank] = at(index);
        void* out = at(index);
        reduce(dtype, op, order, &out, 1, sources, group.size, count_of(index));
    }

    void reduce_slice(int64_t index) const {
        const Span own = slice_of(index, group.rank);
        if (!own.count) return;
        const int64_t offset = own.begin * element_bytes;
        const void* sources[MAX_RANKS];
        for (int rank = 0; rank < group.size; ++rank) sources[rank] = group.in(rank, base + index) + offset;
        sources[group.rank] = at(index) + offset;
        void* outs[2] = {group.out(group.rank, base + index), at(index) + offset};
        if (root == group.rank) outs[0] = outs[1];
        reduce(dtype, op, order, outs, root < 0 ? 2 : 1, sources, group.size, own.count);
    }

    void copy_out(int64_t index) const {
        if (!wants()) return;
        for (int step = 1; step < group.size; ++step) {
            const int rank = (group.rank + step) % group.size;
            const Span theirs = slice_of(index, rank);
            copy(
                at(index) + theirs.begin * element_bytes, group.out(rank, base + index), theirs.count * element_bytes);
        }
    }

    // Block 0 is in, and the ranks have met.
    Status whole_blocks() const {
        for (int64_t index = 0; index < num_blocks; ++index) {
            if (index > 0) {
                copy_in(index);
                const Status status = meet(group, deadline_ns);
                if (status != FINE) return status;
            }
            reduce_whole(index);
        }
        return FINE;
    }

    Status sliced_blocks() const {
        for (int64_t index = 1; index < num_blocks + 2; ++index) {
            if (index < num_blocks) copy_in(index);
            if (index - 1 < num_blocks) reduce_slice(index - 1);
            if (index >= 2) copy_out(index - 2);
            if (index == num_blocks + 1) break; // nothing to hand over any more
            const Status status = meet(group, deadline_ns);
            if (status != FINE) return status;
        }
        return FINE;
    }

    Status direct() const {
        for (int rank = 0; rank < group.size; ++rank) // who gave up waiting may use its memory for something else
            if (has_left(group, rank)) {
                group.culprit = rank;
                return group.broken = LOST;
            }
        const void* sources[MAX_RANKS];
        void* outs[MAX_RANKS];
        int num_outs = 0;
        const Span own = slice(count, group.size, group.rank, element_bytes);
        for (int rank = 0; rank < group.size; ++rank) {
            char* theirs = rank == group.rank ? data : group.at(rank, group.call(rank).place);
            sources[rank] = theirs + own.begin * element_bytes;
            if (root < 0 || root == rank) outs[num_outs++] = theirs + own.begin * element_bytes;
        }
        if (own.count) reduce(dtype, op, order, outs, num_outs, sources, group.size, own.count);
        const Status status = meet(group, deadline_ns);
        if (status == LOST) wait_for_living(group, deadline_ns); // they may still be writing into this rank's data
        return status;
    }

    Status run() {
        Call& call = describe(group, root < 0 ? ALL_REDUCE : REDUCE, dtype, op, root, count, order, form);
        if (num_bytes() > std::min(SMALL_BYTES, group.block_bytes)) call.place = group.place_of(data, num_bytes());
        const bool mine_direct = call.place != 0;
        if (!mine_direct && count) copy_in(0);
        Status status = meet_and_agree(group, deadline_ns);
        if (status != FINE || !count) return status;
        int num_direct = 0;
        for (int rank = 0; rank < group.size; ++rank) num_direct += group.call(rank).place != 0;
        if (num_direct == group.size) return direct();
        group.turn += num_blocks;
        if (num_direct) { // those that thought they would be read in place have to copy after all
            if (mine_direct) copy_in(0);
            status = meet(group, deadline_ns);
            if (status != FINE) return status;
        }
        return whole() ? whole_blocks() : sliced_blocks();
    }
};

// --------------------------------------------------------------------------------------------------- reduce-scatter

struct ReduceScatter {
    Group& group;
    DType dtype;
    Op op;
    Order order;
    const char* const* inputs;
    char* output;
    int64_t count;
    int64_t form;
    int64_t deadline_ns;

    int64_t element_bytes = static_cast<int64_t>(bytes_of(dtype));
    int64_t piece_bytes = group.block_bytes / (64 * group.size) * 64; // of one destination in a slot
    int64_t block = piece_bytes / element_bytes;
    int64_t num_blocks = (count + block - 1) / block;
    uint64_t base = group.turn + 1;

    int64_t count_of(int64_t index) const { return std::min(block, count - index * block); }

    void copy_in(int64_t index) const {
        for (int rank = 0; rank < group.size; ++rank)
            if (rank != group.rank)
                copy(
                    group.in(group.rank, base + index) + rank * piece_bytes,
                    inputs[rank] + index * block * element_bytes, count_of(index) * element_bytes);
    }

    void reduce_piece(int64_t index) const {
        const void* sources[MAX_RANKS];
        for (int rank = 0; rank < group.size; ++rank)
            sources[rank] = group.in(rank, base + index) + group.rank * piece_bytes;
        sources[group.rank] = inputs[group.rank] + index * block * element_bytes;
        void* out = output + index * block * element_bytes;
        reduce(dtype, op, order, &out, 1, sources, group.size, count_of(index));
    }

    // The place of all pieces, where they lie in the arena one behind the other and are worth another meeting.
    int64_t place() const {
        const int64_t each = count * element_bytes;
        for (int rank = 1; rank < group.size; ++rank)
            if (inputs[rank] != inputs[0] + rank * each) return 0;
        return group.size * each > SMALL_BYTES ? group.place_of(inputs[0], group.size * each) : 0;
    }

    Status direct() const {
        const void* sources[MAX_RANKS];
        for (int rank = 0; rank < group.size; ++rank)
            sources[rank] = group.at(rank, group.call(rank).place) + group.rank * count * element_bytes;
        void* out = output;
        reduce(dtype, op, order, &out, 1, sources, group.size, count);
        return meet(group, deadline_ns);
    }

    Status run() {
        Call& call = describe(group, REDUCE_SCATTER, dtype, op, 0, count, order, form);
        call.place = place();
        const bool mine_direct = call.place != 0;
        if (!mine_direct && count) copy_in(0);
        Status status = meet_and_agree(group, deadline_ns);
        if (status != FINE) return status;
        int num_direct = 0;
        for (int rank = 0; rank < group.size; ++rank) num_direct += group.call(rank).place != 0;
        if (num_direct == group.size) return direct();
        group.turn += num_blocks;
        if (num_direct) { // as in an all-reduce
            if (mine_direct) copy_in(0);
            status = meet(group, deadline_ns);
            if (status != FINE) return status;
        }
        for (int64_t index = 0; index < num_blocks; ++index) {
            if (index + 1 < num_blocks) copy_in(index + 1);
            reduce_piece(index);
            if (index + 1 == num_blocks) break;
            status = meet(group, deadline_ns);
            if (status != FINE) return status;
        }
        return FINE;
    }
};

// --------------------------------------------------------------------------------------------------- moving of bytes

struct Exchange {
    Group& group;
    int columns;
    const char* const* sends;
    const int64_t* send_bytes;
    char* const* receives;
    const int64_t* receive_bytes;
    int64_t deadline_ns;

    bool large = false; // known once all have met

    // What rank `from` says it sends to `to`, and what `to` says it expects from `from`.
    int64_t sent(int from, int to) const { return group.lengths(from)[to]; }
    int64_t expected(int to, int from) const { return group.lengths(to)[group.size + from]; }
    void put(char* into, const char* from, int64_t num_bytes) const {
        (large ? copy_past_caches : copy)(into, from, num_bytes);
    }

    int columns_of(int rank) const { return static_cast<int>(group.call(rank).lengths); }

    void publish_lengths() const {
        int64_t* lengths = group.lengths(group.rank);
        for (int rank = 0; rank < group.size; ++rank) {
            lengths[rank] = columns == 0 ? 0 : send_bytes[columns == 1 ? 0 : rank];
            lengths[group.size + rank] = receive_bytes[rank];
        }
        group.call(group.rank).lengths = columns;
    }

    // All ranks look at all pairs, so all find the same. Who expects nothing need not be sent nothing.
    Status check_lengths() const {
        for (int from = 0; from < group.size; ++from)
            for (int to = 0; to < group.size; ++to)
                if (sent(from, to) != expected(to, from) && (expected(to, from) || columns_of(from) != 1)) {
                    group.culprit = from;
                    group.expecting = to;
                    return group.broken = MISMATCH;
                }
        return FINE;
    }

    int64_t piece_bytes(int rank) const { return group.block_bytes / (64 * std::max(1, columns_of(rank))) * 64; }

    void copy_in(uint64_t turn, int64_t index) const {
        const int64_t piece = group.block_bytes / (64 * std::max(1, columns)) * 64;
        for (int column = 0; column < columns; ++column) {
            const int64_t begin = index * piece, rest = send_bytes[column] - begin;
            if (rest > 0 && (columns == 1 || column != group.rank))
                copy(group.in(group.rank, turn) + column * piece, sends[column] + begin, std::min(piece, rest));
        }
    }

    void copy_out(uint64_t turn, int64_t index) const {
        for (int step = 1; step < group.size; ++step) {
            const int from = (group.rank + step) % group.size;
            if (group.call(from).place) continue;
            const int64_t piece = piece_bytes(from), begin = index * piece, rest = receive_bytes[from] - begin;
            const int64_t column = columns_of(from) == 1 ? 0 : group.rank;
            if (rest > 0) put(receives[from] + begin, group.in(from, turn) + column * piece, std::min(piece, rest));
        }
    }

    void copy_directly() const {
        for (int step = 1; step < group.size; ++step) {
            const int from = (group.rank + step) % group.size;
            if (!group.call(from).place || !receive_bytes[from]) continue;
            int64_t offset = 0;
            if (columns_of(from) > 1)
                for (int to = 0; to < group.rank; ++to) offset += sent(from, to);
            put(receives[from], group.at(from, group.call(from).place) + offset, receive_bytes[from]);
        }
    }

    void copy_own() const {
        if (!columns || !receive_bytes[group.rank]) return;
        const char* own = sends[columns == 1 ? 0 : group.rank];
        if (own != receives[group.rank]) put(receives[group.rank], own, receive_bytes[group.rank]);
    }

    int64_t received_bytes() const {
        int64_t total = 0;
        for (int to = 0; to < group.size; ++to)
            for (int from = 0; from < group.size; ++from) total += expected(to, from);
        return total;
    }

    int senders() const {
        int found = 0;
        for (int from = 0; from < group.size; ++from) found += columns_of(from) > 0;
        return found;
    }

    // Blocks of the longest piece that is staged.
    int64_t blocks() const {
        int64_t most = 0;
        for (int from = 0; from < group.size; ++from)
            for (int to = 0; to < group.size && !group.call(from).place; ++to)
                if (from != to) most = std::max(most, (expected(to, from) + piece_bytes(from) - 1) / piece_bytes(from));
        return most;
    }

    // The place of all pieces, where they lie in the arena one behind the other.
    int64_t place() const {
        int64_t total = 0;
        for (int column = 0; column < columns; ++column) {
            if (sends[column] != sends[0] + total) return 0;
            total += send_bytes[column];
        }
        return total > SMALL_BYTES ? group.place_of(sends[0], total) : 0;
    }

    Status run(Kind kind, int32_t dtype, int32_t root, int64_t count, int64_t form) {
        Call& call = describe(group, kind, dtype, 0, root, count, 0, form);
        publish_lengths();
        call.place = columns ? place() : 0;
        const uint64_t base = group.turn + 1;
        if (!call.place) copy_in(base, 0);
        Status status = meet_and_agree(group, deadline_ns);
        if (status == FINE) status = check_lengths();
        if (status != FINE) return status;
        const int64_t num_blocks = blocks();
        group.turn += num_blocks;
        large = received_bytes() >= (senders() > 1 ? LARGE_BYTES / 3 : LARGE_BYTES); // own copies need room, too
        copy_own();
        copy_directly();
        for (int64_t index = 0; index < num_blocks; ++index) {
            if (index + 1 < num_blocks && !call.place) copy_in(base + index + 1, index + 1);
            copy_out(base + index, index);
            if (index + 1 == num_blocks) break;
            status = meet(group, deadline_ns);
            if (status != FINE) return status;
        }
        for (int rank = 0; rank < group.size; ++rank) // who was read in place has to know when that is over
            if (group.call(rank).place) return meet(group, deadline_ns);
        return FINE;
    }
};

} // namespace pt

using namespace pt;

static Group& usable(pt_group* handle) { return *reinterpret_cast<Group*>(handle); }

int32_t pt_all_reduce(
    pt_group* handle, int32_t dtype, int32_t op, int32_t order, int32_t root, void* data, int64_t count,
    int64_t form, double timeout_s) {
    Group& group = usable(handle);
    if (group.broken != FINE) return BROKEN;
    return AllReduce{group, DType(dtype), Op(op), Order(order), root, static_cast<char*>(data), count, form,
                     deadline_after(timeout_s)}.run();
}

int32_t pt_reduce_scatter(
    pt_group* handle, int32_t dtype, int32_t op, int32_t order, const void* const* inputs, void* output, int64_t count,
    int64_t form, double timeout_s) {
    Group& group = usable(handle);
    if (group.broken != FINE) return BROKEN;
    return ReduceScatter{group, DType(dtype), Op(op), Order(order), reinterpret_cast<const char* const*>(inputs),
                         static_cast<char*>(output), count, form, deadline_after(timeout_s)}.run();
}

int32_t pt_exchange(
    pt_group* handle, int32_t kind, int32_t dtype, int32_t root, int64_t count, int64_t form, int32_t columns,
    const void* const* sends, const int64_t* send_bytes, void* const* receives, const int64_t* receive_bytes, double timeout_s) {
    Group& group = usable(handle);
    if (group.broken != FINE) return BROKEN;
    return Exchange{group, columns, reinterpret_cast<const char* const*>(sends), send_bytes,
                    reinterpret_cast<char* const*>(receives), receive_bytes, deadline_after(timeout_s)}
        .run(Kind(kind), dtype, root, count, form);
}
