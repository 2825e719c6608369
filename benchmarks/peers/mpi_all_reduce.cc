// MPI_Allreduce of floats in place, as `lockstep bench collectives` measures ours: one line of JSON.
#include <mpi.h>

#include <cstdio>
#include <vector>

namespace {

double microseconds(std::size_t bytes) {
  std::vector<float> data(bytes / sizeof(float), 1.0F);
  const int rounds = bytes < (1 << 20) ? 1000 : 30;
  const int warm_up = 5;
  double start = 0;
  for (int i = -warm_up; i < rounds; ++i) {
    if (i == 0) {
      MPI_Barrier(MPI_COMM_WORLD);
      start = MPI_Wtime();
    }
    MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  return (MPI_Wtime() - start) / rounds * 1e6;
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
