// MPI_Allreduce of floats in place, as `lockstep bench collectives` measures ours: one line of JSON.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace {

// Returns the seconds of one reduction.
double seconds(std::vector<float>& data, int rounds) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  for (int i = 0; i < rounds; ++i) {
    MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  return (MPI_Wtime() - start) / rounds;
}

// Half a second, as ours: congestion control makes the first few rounds over TCP faster than those that follow.
double microseconds(std::size_t bytes) {
  std::vector<float> data(bytes / sizeof(float), 1.0F);
  seconds(data, 2);
  int rounds = std::clamp(static_cast<int>(0.5 / seconds(data, 3)), 5, 100'000);
  MPI_Bcast(&rounds, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return seconds(data, rounds) * 1e6;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) std::printf("{\"us\": {");
  const char* separator = "";
  for (const std::size_t bytes : {4UL, 4096UL, 65536UL, 1388584UL, 16UL << 20, 64UL << 20}) {
    const double us = microseconds(bytes);
    if (rank == 0) std::printf("%s\"%zu\": %.2f", separator, bytes, us);
    separator = ", ";
  }
  if (rank == 0) std::printf("}}\n");
  MPI_Finalize();
}
