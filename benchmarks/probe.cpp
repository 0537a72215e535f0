// What this machine can do at most: bytes read per second, fused multiply-adds per second.
// Usage: probe THREADS. Prints "GB/s GFLOP/s", the best of several runs.
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

typedef float Vector __attribute__((vector_size(32), aligned(4)));

static double read_gb_per_s(int threads) {
  const size_t count = (256u << 20) / sizeof(float);
  std::vector<float> data(count, 1.0f);
  double best = 1e9;
  float sink = 0;
  for (int run = 0; run < 9; ++run) {
    const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : sink)
    {
      const size_t part = count / threads / 32 * 32;
      const float* p = data.data() + part * omp_get_thread_num();
      Vector sums[4] = {};
      for (size_t i = 0; i < part; i += 32)
        for (int j = 0; j < 4; ++j) sums[j] += *reinterpret_cast<const Vector*>(p + i + 8 * j);
      for (const Vector& sum : sums) sink += sum[0] + sum[7];
    }
    best = std::min(best, omp_get_wtime() - start);
  }
  std::fprintf(stderr, "(%g)\n", sink);
  return count * sizeof(float) / best / 1e9;
}

static double gflop_per_s(int threads) {
  constexpr long kSteps = 4000000;
  constexpr int kChains = 10;
  double best = 1e9;
  float sink = 0;
  for (int run = 0; run < 5; ++run) {
    const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : sink)
    {
      Vector sums[kChains], factor = {};
      for (int j = 0; j < 8; ++j) factor[j] = 0.999f;
      for (Vector& sum : sums) sum = factor;
      for (long i = 0; i < kSteps; ++i)
#pragma GCC unroll 10
        for (int j = 0; j < kChains; ++j) sums[j] = sums[j] * factor + factor;
      for (const Vector& sum : sums) sink += sum[0];
    }
    best = std::min(best, omp_get_wtime() - start);
  }
  std::fprintf(stderr, "(%g)\n", sink);
  return threads * kSteps * kChains * 16.0 / best / 1e9;
}

int main(int, char** arguments) {
  const int threads = std::atoi(arguments[1]);
  std::printf("%.1f %.1f\n", read_gb_per_s(threads), gflop_per_s(threads));
}
