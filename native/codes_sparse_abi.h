// The C interface of the codecs where a few elements are sent. All tensors are flat, float32, and shorter than 2^31.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What is looked at: v = x where r and u are null; v = x + r; or, with u, v = r + (momentum · u + scale · x).
typedef struct {
    const void *x, *r, *u;
    float momentum, scale;
} pt_sparse_source;

// How many |v_i| > cut. `bad`: the index of the first v that is NaN or infinite, or -1. Reads the source once.
__attribute__((visibility("default"))) int64_t pt_sparse_count(
    const pt_sparse_source* source, float cut, int64_t n, int64_t* bad);

// How many |v_i| >= cut, at least those that are > 0; the first `room` of them in `indices` and `values`.
__attribute__((visibility("default"))) int64_t pt_sparse_above(
    const pt_sparse_source* source, float cut, int64_t n, void* indices, void* values, int64_t room, int64_t* bad);

// The k largest |v_i|, of equal ones those of the lowest index, in ascending order of indices. `scratch`: memory for
// `room` entries of 8 bytes; the fewer, the more often the source has to be read five times instead of once.
// Where `bad` is not -1 afterwards, nothing else is to be used.
__attribute__((visibility("default"))) void pt_sparse_top(
    const pt_sparse_source* source, int64_t n, int64_t k, void* indices, void* values, void* scratch, int64_t room,
    int64_t* bad);

// Of each of `num_chunks` chunks of `size` values the k largest |v_i|, of equal ones those of the lowest index: their
// indices within the chunk (int64, ascending), and values; k of each chunk one after the other. 0 < k <= size.
__attribute__((visibility("default"))) void pt_sparse_chunk_top(
    const void* values, int64_t num_chunks, int64_t size, int64_t k, void* indices, void* chosen);

// Strom's codes of v = x + r (r null: of x), and r ← v - what is sent. All v are finite: pt_sparse_count has looked.
//
//   list   a word for each |v_i| > tau: index, and the highest bit where v_i < 0                count words
//   map    word j for elements 16j…: bit i where v > tau, bit 16 + i where v < -tau           ⌈n/16⌉ words
__attribute__((visibility("default"))) void pt_threshold_pack(
    const void* x, void* r, float tau, int64_t n, int32_t is_map, void* words);

// out += what `num_words` such words say. 0: fine; 1: they say what is impossible, and nothing was added.
__attribute__((visibility("default"))) int32_t pt_threshold_add(
    void* out, int64_t n, const void* words, int64_t num_words, float tau, int32_t is_map);

// out[indices[j]] += values[j]. 0: fine; 1: an index is not in out, and nothing was added.
__attribute__((visibility("default"))) int32_t pt_sparse_add(
    void* out, int64_t n, const void* indices, const void* values, int64_t count);

// data[indices[j]] = 0. The indices are those of pt_sparse_top or pt_sparse_above.
__attribute__((visibility("default"))) void pt_sparse_zero(void* data, const void* indices, int64_t count);

// u ← momentum · u + scale · x;  v ← v + u.
__attribute__((visibility("default"))) void pt_sparse_accumulate(
    const void* x, void* u, void* v, float momentum, float scale, int64_t n);

#ifdef __cplusplus
}
#endif
