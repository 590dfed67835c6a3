// Workers that learn on one copy of the weights. Their races are the algorithm, and made of relaxed atomic accesses,
// so the thread sanitizer has nothing to say; and with locks or in turn nothing is lost.
#include <algorithm>

#include "crew.h"
#include "sparse.h"

namespace {

constexpr int64_t NUM_ROWS = 400, NUM_COLUMNS = 50, PER_ROW = 5, APART = NUM_COLUMNS / PER_ROW;

struct Problem {
    std::vector<int64_t> starts{0}, order;
    std::vector<int32_t> columns;
    std::vector<float> values, labels, weights = std::vector<float>(NUM_COLUMNS);
    std::vector<uint32_t> locks = std::vector<uint32_t>(NUM_COLUMNS);
    uint64_t turn = 0;

    explicit Problem(Random random) {
        for (int64_t row = 0; row < NUM_ROWS; ++row) {
            for (int64_t i = 0; i < PER_ROW; ++i)
                columns.push_back(static_cast<int32_t>(i * APART + random.below(APART)));
            for (int64_t i = 0; i < PER_ROW; ++i) values.push_back(static_cast<float>(random.below(100)) / 50 - 1);
            labels.push_back(random.below(2) ? 1.0f : -1.0f);
            starts.push_back(static_cast<int64_t>(columns.size()));
            order.push_back(row);
        }
    }

    pt_logistic face() {
        return {starts.data(), columns.data(), values.data(), labels.data(), nullptr, weights.data(), locks.data(),
                &turn, NUM_COLUMNS};
    }
};

void learn(Problem& problem, int num_workers, int32_t update, int64_t window) {
    std::vector<std::thread> workers;
    for (int worker = 0; worker < num_workers; ++worker)
        workers.emplace_back([&, worker] {
            const pt_logistic face = problem.face();
            int64_t updates = 0;
            CHECK(pt_logistic_epoch(
                      &face, problem.order.data(), worker, NUM_ROWS, num_workers, 0.1f, update, window, LONG_S,
                      &updates) == 0);
            CHECK(updates == (NUM_ROWS - worker + num_workers - 1) / num_workers);
        });
    for (std::thread& worker : workers) worker.join();
    for (const float weight : problem.weights) CHECK(weight > -100 && weight < 100);
    for (const uint32_t lock : problem.locks) CHECK(lock == 0);
}

void add(int num_workers, int32_t atomic) {
    std::vector<float> table(30 * 7);
    std::vector<std::thread> workers;
    for (int worker = 0; worker < num_workers; ++worker)
        workers.emplace_back([&] {
            for (int64_t round = 0; round < 50; ++round) {
                const int64_t rows[] = {round % 30, 3, 3, 29};
                const std::vector<float> values(4 * 7, 1.0f);
                CHECK(pt_scatter_add(0, table.data(), 30, 7, rows, values.data(), 4, 0.5, atomic) == 0);
            }
        });
    for (std::thread& worker : workers) worker.join();
    const float most = 0.5f * 50 * 2 * static_cast<float>(num_workers) + 2 * static_cast<float>(num_workers);
    float sum = 0;
    for (const float value : table) {
        CHECK(value >= 0 && value <= most); // some may be lost, none comes from nowhere
        sum += value;
    }
    if (atomic) CHECK(sum == 0.5f * 50 * 4 * 7 * static_cast<float>(num_workers)); // none is lost
}

} // namespace

int main(int count, char** arguments) {
    const Random random{seed_from(count, arguments)};
    for (int num_workers = 1; num_workers <= 4; ++num_workers) {
        for (const auto& [update, window] : {std::pair<int32_t, int64_t>{PT_FREE, 1}, {PT_FREE, 16}, {PT_ATOMIC, 1},
                                            {PT_ATOMIC, 16}, {PT_LOCKED, 1}, {PT_IN_TURN, 1}}) {
            Problem problem(random);
            learn(problem, num_workers, update, window);
        }
        for (const int32_t atomic : {0, 1}) add(num_workers, atomic);
    }
}
