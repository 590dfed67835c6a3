// Sparse updates of one shared copy of weights, without locks (Hogwild!) and with (for comparison).
//
// The data are rows in compressed form: row r has the entries starts[r] … starts[r + 1] - 1, each a column and a
// value. A step on row r reads the weights of r's columns, and writes only those.
#pragma once

#include <stdint.h>

#include "polytempo.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const int64_t* starts;  // rows + 1
    const int32_t* columns; // rising within a row where update is PT_LOCKED
    const float* values;
    const float* labels; // of each row, +1 or -1
    const float* decay;  // of each column, added to the gradient times the weight; null: none
    float* weights;      // the one copy, shared by all workers
    uint32_t* locks;     // PT_LOCKED: a word for each column, shared, 0 at the beginning
    uint64_t* turn;      // PT_IN_TURN: the position whose update is next, shared
    int64_t num_columns;
} pt_logistic;

enum { PT_FREE = 0, PT_LOCKED = 1, PT_IN_TURN = 2, PT_ATOMIC = 3 };

// One pass of stochastic gradient descent over the rows order[begin], order[begin + stride], … before end:
// weights -= step_size * (gradient of log(1 + exp(-label * row . weights)) + decay * weights), on the row's columns.
//
// PT_FREE: `window` rows are learned from between two exchanges with the shared weights. With 1 every row's update
// is written at once, as Hogwild! does; with more, a worker's own updates reach the others that much later.
// PT_ATOMIC: as PT_FREE, but no addition is lost: each weight is replaced by compare-exchange.
// PT_LOCKED: the row's columns are locked while they are written. PT_IN_TURN: position p is written after p - 1.
// `updates` becomes the number of rows learned from. Answers 0, or 2 when a lock or a turn did not come in time; or
// 5 when there is no memory for the window.
PT_EXPORT int32_t pt_logistic_epoch(
    const pt_logistic* problem, const int64_t* order, int64_t begin, int64_t end, int64_t stride, float step_size,
    int32_t update, int64_t window, double timeout_s, int64_t* updates);

// table[rows[i], :] += scale * values[i, :] for i = 0, 1, …, numbers of dtype 0 (float) or 1 (double). Each element is
// added to by one relaxed load and one store, so of two additions at the same moment one may be lost; with `atomic` by
// compare-exchange, so none is, and elements whose addition is 0 are not written. A row may occur several times.
// Answers 0, or 3 when a row is not in the table or the dtype is another (then nothing was added).
PT_EXPORT int32_t pt_scatter_add(
    int32_t dtype, void* table, int64_t num_rows, int64_t width, const int64_t* rows, const void* values, int64_t count,
    double scale, int32_t atomic);

#ifdef __cplusplus
}
#endif
