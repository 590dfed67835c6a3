// The native core's C interface. Pointers, lengths and status codes; no types of any framework.
//
// Every function that waits takes `timeout_s` and answers a status: 0 fine, 1 a rank is lost, 2 the deadline is over,
// 3 ranks do different things, 4 the group broke in an earlier call. After anything but 0 the group is of no use;
// pt_group_culprit says which rank it was about, pt_group_call what a rank said that it was doing.
//
// One thread at a time may use a group's collectives, and one its send and receive (they do not meet).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PT_EXPORT __attribute__((visibility("default")))

typedef struct pt_group pt_group;
typedef struct pt_transfer pt_transfer;

typedef struct {
    int32_t rank, size, pid, num_cores;
    void* control;         // pt_control_bytes(size) bytes in shared memory, zero when the first rank opens it
    void* const* arenas;   // where each rank's arena begins in this process
    void* const* staging;  // 4 * block_bytes of each rank, in its arena
    void* const* rings;    // pt_rings_bytes(size, ring_bytes) of each rank, in its arena, zero at the beginning
    const int32_t* pidfds; // readable when a rank's process has ended; -1 where there is none
    int64_t arena_bytes, block_bytes, ring_bytes;
} pt_group_place;

typedef struct {
    int64_t number, count, extra, form;
    int32_t kind, dtype, op, root;
} pt_call;

PT_EXPORT int32_t pt_abi_version(void);

PT_EXPORT int64_t pt_control_bytes(int32_t size);
PT_EXPORT int64_t pt_rings_bytes(int32_t size, int64_t ring_bytes);
PT_EXPORT pt_group* pt_group_open(const pt_group_place* place);
PT_EXPORT void pt_group_leave(pt_group* group);         // tell the others; their waits end with 1
PT_EXPORT int32_t pt_group_empty(pt_group* group);      // called last: this rank is done; are all others, too, or ended?
PT_EXPORT void pt_group_close(pt_group* group);         // free this process's part
PT_EXPORT int32_t pt_group_culprit(pt_group* group);
// Where ranks disagree about the size of a piece: the rank that expects `expected` bytes of the culprit, which sends it
// `sent`. -1: it is something else.
PT_EXPORT int32_t pt_group_expecting(pt_group* group, int64_t* sent, int64_t* expected);
PT_EXPORT int32_t pt_group_missing(pt_group* group, int32_t rank); // has `rank` not come as far as this one?
// Say that the next call is going to be made, though perhaps by another thread. 1: all others have said so, too, or
// say so within `patience_s`, so whoever makes it now does not wait for a program that has not come so far.
PT_EXPORT int32_t pt_group_issue(pt_group* group, double patience_s);
PT_EXPORT void pt_group_call(pt_group* group, int32_t rank, pt_call* call);

PT_EXPORT int32_t pt_barrier(pt_group* group, double timeout_s);

// In all that follows `form` is whatever the caller wants to be the same on every rank besides: the data's shape.

// data (count elements of dtype) becomes op over all ranks, on `root` or, where root is -1, on every rank.
// order 0: rank by rank; 1: a balanced tree over the ranks. A data pointer into the arena on every rank is read there.
PT_EXPORT int32_t pt_all_reduce(
    pt_group* group, int32_t dtype, int32_t op, int32_t order, int32_t root, void* data, int64_t count, int64_t form,
    double timeout_s);

// output (count elements) becomes op over all ranks' inputs[this rank]; inputs are `size` pieces of count elements.
PT_EXPORT int32_t pt_reduce_scatter(
    pt_group* group, int32_t dtype, int32_t op, int32_t order, const void* const* inputs, void* output, int64_t count,
    int64_t form, double timeout_s);

// Move bytes. Each rank sends `columns` pieces: one for everybody (1), one for each rank (size), or none (0), and
// expects receive_bytes[p] from each rank p into receives[p]. kind, dtype, root and count are compared between ranks,
// and so is every piece with what its receiver expects.
PT_EXPORT int32_t pt_exchange(
    pt_group* group, int32_t kind, int32_t dtype, int32_t root, int64_t count, int64_t form, int32_t columns,
    const void* const* sends, const int64_t* send_bytes, void* const* receives, const int64_t* receive_bytes, double timeout_s);

// Point to point. A transfer is begun, advanced by anyone who waits for any transfer of the group, and freed.
PT_EXPORT pt_transfer* pt_send(pt_group* group, int32_t to, int32_t tag, int32_t dtype, const void* data, int64_t num_bytes);
PT_EXPORT pt_transfer* pt_receive(pt_group* group, int32_t source, int32_t tag, int32_t dtype, void* data, int64_t num_bytes); // source -1: any
PT_EXPORT int32_t pt_transfer_done(pt_group* group, pt_transfer* transfer); // 1 done (well or not), 0 not yet; tries once
PT_EXPORT int32_t pt_transfer_wait(pt_group* group, pt_transfer* transfer, double timeout_s);
PT_EXPORT int32_t pt_transfer_peer(pt_transfer* transfer);
PT_EXPORT int64_t pt_transfer_arrived_bytes(pt_transfer* transfer); // what the sender sent, where it did not fit
PT_EXPORT int32_t pt_transfer_arrived_dtype(pt_transfer* transfer);
PT_EXPORT void pt_transfer_free(pt_group* group, pt_transfer* transfer);
// For a thread of its own: sleep until a message is held up that this rank has a part in, or the time is over; then move
// what can be moved. pt_transfers_wake ends the sleep.

// A word of shared memory that hands a piece of memory from one process to another. Whatever a process has read or
// written there before it sets the word, happened before what another one does after it has seen the new value.
PT_EXPORT void pt_word_set(uint32_t* word, uint32_t value);
PT_EXPORT uint32_t pt_word_seen(const uint32_t* word);
PT_EXPORT void pt_transfers_serve(pt_group* group, double timeout_s);
PT_EXPORT void pt_transfers_wake(pt_group* group);

#ifdef __cplusplus
}
#endif
