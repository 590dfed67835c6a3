// One copy of the weights: two tensors with gradients and one with rows, many steps without a pause between them.
//
// Plain SGD of whole numbers with a step size of one, so all is exact: parameter -= sum of the ranks' gradients. Every
// rank reads the whole copy after each step, and overwrites its gradients at once.
#include <cmath>

#include "crew.h"
#include "kernels.h"
#include "step.h"

namespace {

constexpr int64_t COUNTS[] = {20000, 1000, 64 * 4}; // f32, f64, and f32 by rows of 4
constexpr int64_t WIDTH = 4, NUM_TENSORS = 3, ROWS = 5, SPACE_BYTES = 96 << 10, NUM_STEPS = 30;

// A rank's part of what it shares.
struct Shared {
    char *gradients, *rows, *values, *notes, *log, *block;

    Shared(const Crew& crew, int rank) {
        gradients = static_cast<char*>(crew.data[rank]);
        rows = gradients + SPACE_BYTES;
        values = rows + 64;
        notes = values + 128;
        log = notes + (pt_notes_bytes(NUM_TENSORS) + 63) / 64 * 64;
        block = log + pt_log_bytes(); // of rank 0
    }
};

int64_t value(int64_t step, int rank, int64_t index) { return (step * 3 + rank * 5 + index * 7) % 9 - 4; }
int64_t row(int64_t step, int rank, int64_t i) { return (step * 11 + rank * 2 + i % 3 * 13) % 64; } // some occur twice

// What all ranks together subtract from each element, and the squares of it.
void subtract(std::vector<double>& parameters, int64_t step, int size, double& squares) {
    std::vector<double> sum(parameters.size());
    const int64_t before = COUNTS[0] + COUNTS[1];
    for (int rank = 0; rank < size; ++rank) {
        for (int64_t i = 0; i < before; ++i) sum[i] += static_cast<double>(value(step, rank, i));
        for (int64_t i = 0; i < ROWS * WIDTH; ++i)
            sum[before + row(step, rank, i / WIDTH) * WIDTH + i % WIDTH] += static_cast<double>(value(step, rank, i));
    }
    squares = 0;
    for (size_t i = 0; i < sum.size(); ++i) {
        parameters[i] -= sum[i];
        squares += sum[i] * sum[i];
    }
}

void write_gradients(const Shared& mine, int64_t step, int rank) {
    auto* first = reinterpret_cast<float*>(mine.gradients);
    auto* second = reinterpret_cast<double*>(mine.gradients + COUNTS[0] * 4);
    auto* values = reinterpret_cast<float*>(mine.values);
    for (int64_t i = 0; i < COUNTS[0]; ++i) first[i] = static_cast<float>(value(step, rank, i));
    for (int64_t i = 0; i < COUNTS[1]; ++i) second[i] = static_cast<double>(value(step, rank, COUNTS[0] + i));
    for (int64_t i = 0; i < ROWS; ++i) reinterpret_cast<int64_t*>(mine.rows)[i] = row(step, rank, i);
    for (int64_t i = 0; i < ROWS * WIDTH; ++i) values[i] = static_cast<float>(value(step, rank, i));
}

void check(const char* block, const std::vector<double>& parameters) {
    const auto* first = reinterpret_cast<const float*>(block);
    const auto* second = reinterpret_cast<const double*>(block + COUNTS[0] * 4);
    const auto* third = reinterpret_cast<const float*>(block + COUNTS[0] * 4 + COUNTS[1] * 8);
    for (int64_t i = 0; i < COUNTS[0]; ++i) CHECK(first[i] == static_cast<float>(parameters[i]));
    for (int64_t i = 0; i < COUNTS[1]; ++i) CHECK(second[i] == parameters[COUNTS[0] + i]);
    for (int64_t i = 0; i < COUNTS[2]; ++i)
        CHECK(third[i] == static_cast<float>(parameters[COUNTS[0] + COUNTS[1] + i]));
}

void train(Crew& crew, int rank) {
    pt_group* group = crew.groups[rank];
    const Shared mine(crew, rank);
    std::vector<void*> gradients, notes, logs;
    for (int other = 0; other < crew.size; ++other) {
        const Shared theirs(crew, other);
        gradients.push_back(theirs.gradients);
        notes.push_back(theirs.notes);
        logs.push_back(theirs.log);
    }
    const pt_tensor tensors[] = {{0, 0, COUNTS[0], COUNTS[0], pt::F32, 0},
                                 {COUNTS[0] * 4, COUNTS[0] * 4, COUNTS[1], COUNTS[1], pt::F64, 0},
                                 {COUNTS[0] * 4 + COUNTS[1] * 8, -1, COUNTS[2], WIDTH, pt::F32, 0}};
    char* block = Shared(crew, 0).block;
    const pt_plan_place place{
        tensors, NUM_TENSORS, {block, nullptr, nullptr}, gradients.data(), notes.data(), logs.data()};
    pt_plan* plan = pt_plan_open(group, &place);
    pt_hyper hyper{};
    hyper.lr = 1;
    hyper.rule = pt::SGD;
    const auto* arena = static_cast<const char*>(crew.arenas[rank]);
    const pt_rows rows[] = {{}, {}, {mine.rows - arena, mine.values - arena, ROWS}};
    const uint8_t used[] = {1, 1, 1};
    const pt_part part{1.0, used, rows};
    float steps[NUM_TENSORS] = {};
    std::vector<double> parameters(COUNTS[0] + COUNTS[1] + COUNTS[2]);
    for (int64_t step = 0; step < NUM_STEPS; ++step) {
        write_gradients(mine, step, rank);
        double squares = 0, norm = 0;
        subtract(parameters, step, crew.size, squares);
        CHECK(pt_norm(group, plan, &part, LONG_S, &norm) == 0);
        CHECK(std::fabs(norm - std::sqrt(squares)) <= 1e-12 * norm);
        double sums[2 * NUM_TENSORS] = {};
        CHECK(pt_layer_squares(group, plan, &part, nullptr, 0, steps, LONG_S, sums) == 0);
        CHECK(sums[1] > 0 && sums[3] > 0 && sums[1] + sums[3] <= (1 + 1e-12) * squares);
        CHECK(sums[4] == 0 && sums[5] == 0); // its gradient comes as rows
        int32_t done = 0;
        CHECK(pt_step(group, plan, &part, &hyper, 1, steps, LONG_S, &done) == 0);
        CHECK(done == 1 && steps[0] == static_cast<float>(step + 1));
        std::memset(mine.gradients, 0xee, 4096); // ours again
        check(block, parameters);
    }
    pt_plan_close(plan);
}

} // namespace

int main() {
    const int64_t own_bytes = SPACE_BYTES + 256 + pt_notes_bytes(NUM_TENSORS) + pt_log_bytes();
    for (int size = 1; size <= 5; ++size) {
        Crew crew(size, 1024, 256, own_bytes + SPACE_BYTES);
        crew.run([&](int rank) { train(crew, rank); });
    }
}
