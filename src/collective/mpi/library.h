// The site's MPI library as a table of functions. No header of MPI is needed: one binary uses Open MPI, libraries with
// MPICH's ABI (MPICH, Intel MPI, MVAPICH, Cray's), and those with the ABI of MPI 5.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include "lockstep/base/buffer.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::mpi {

// A communicator, group, request, operator or dtype: an int by MPICH's ABI, else a pointer. A function that returns an
// int handle writes only its bytes, so handles begin as 0.
using Handle = std::uintptr_t;

// An MPI_Status of any ABI.
struct alignas(8) Status {
  std::array<std::byte, 64> bytes{};
};

using Reducer = void(void* in, void* in_and_out, int* count, void* dtype);

// The functions that we call. Each returns an error code.
#define LOCKSTEP_MPI_FUNCTIONS(each)                                                                                  \
  each(MPI_Get_library_version, int(char* version, int* length));                                                     \
  each(MPI_Initialized, int(int* flag));                                                                              \
  each(MPI_Finalized, int(int* flag));                                                                                \
  each(MPI_Init_thread, int(int* argc, char*** argv, int wanted, int* provided));                                     \
  each(MPI_Query_thread, int(int* provided));                                                                         \
  each(MPI_Finalize, int());                                                                                          \
  each(MPI_Error_string, int(int code, char* words, int* length));                                                    \
  each(MPI_Error_class, int(int code, int* error_class));                                                             \
  each(MPI_Comm_rank, int(Handle comm, int* rank));                                                                   \
  each(MPI_Comm_group, int(Handle comm, Handle * group));                                                             \
  each(MPI_Group_incl, int(Handle group, int size, const int* ranks, Handle* made));                                  \
  each(MPI_Group_free, int(Handle * group));                                                                          \
  each(MPI_Comm_create_group, int(Handle comm, Handle group, int tag, Handle* made));                                 \
  each(MPI_Comm_set_errhandler, int(Handle comm, Handle handler));                                                    \
  each(MPI_Comm_free, int(Handle * comm));                                                                            \
  each(MPI_Op_create, int(Reducer * function, int commutes, Handle* op));                                             \
  each(MPI_Test, int(Handle * request, int* done, Status* status));                                                   \
  each(MPI_Get_count, int(const Status* status, Handle dtype, int* count));                                           \
  each(MPI_Ibarrier, int(Handle comm, Handle * request));                                                             \
  each(MPI_Iallreduce,                                                                                                \
       int(const void* from, void* to, int count, Handle dtype, Handle op, Handle comm, Handle* request));            \
  each(MPI_Ireduce,                                                                                                   \
       int(const void* from, void* to, int count, Handle dtype, Handle op, int root, Handle comm, Handle* request));  \
  each(MPI_Ireduce_scatter,                                                                                           \
       int(const void* from, void* to, const int* counts, Handle dtype, Handle op, Handle comm, Handle* request));    \
  each(MPI_Ibcast, int(void* data, int count, Handle dtype, int root, Handle comm, Handle* request));                 \
  each(MPI_Iallgatherv, int(const void* from, int count, Handle sent, void* to, const int* counts, const int* places, \
                            Handle received, Handle comm, Handle* request));                                          \
  each(MPI_Igatherv, int(const void* from, int count, Handle sent, void* to, const int* counts, const int* places,    \
                         Handle received, int root, Handle comm, Handle* request));                                   \
  each(MPI_Iscatterv, int(const void* from, const int* counts, const int* places, Handle sent, void* to, int count,   \
                          Handle received, int root, Handle comm, Handle* request));                                  \
  each(MPI_Ialltoallv,                                                                                                \
       int(const void* from, const int* counts, const int* places, Handle sent, void* to, const int* to_counts,       \
           const int* to_places, Handle received, Handle comm, Handle* request));                                     \
  each(MPI_Isend, int(const void* from, int count, Handle dtype, int to, int tag, Handle comm, Handle* request));     \
  each(MPI_Irecv, int(void* to, int count, Handle dtype, int from, int tag, Handle comm, Handle* request))

// Values that mpi.h would define.
struct Constants {
  Handle world = 0, errors_return = 0;
  void* in_place = nullptr;
  int thread_multiple = 3;
  int error_truncate = 15;               // the class of an error
  std::array<Handle, kDTypes> dtypes{};  // MPI's 16-bit integers for 16-bit floats, which are moved and not reduced
  std::array<Handle, 5> ops{};           // in the order of ReduceOp; mean adds
};

struct Library {
#define LOCKSTEP_MEMBER(name, ...) std::type_identity_t<__VA_ARGS__>* name = nullptr
  LOCKSTEP_MPI_FUNCTIONS(LOCKSTEP_MEMBER);
#undef LOCKSTEP_MEMBER
  Constants constants;
  std::string product;  // "Open MPI v4.1.4"

  Handle dtype(DType dtype) const { return constants.dtypes[static_cast<std::size_t>(dtype)]; }
};

// Opens the library that LOCKSTEP_MPI_LIBRARY names, else the one that belongs to the launcher. Throws InvalidArgument
// where MPI's launcher has not started this process, where there is no library, and where it is not the launcher's.
// Any thread.
const Library& library();

// MPI has reported an error.
class CallFailed : public Error {
 public:
  using Error::Error;
};

// Throws InvalidArgument for a message that is longer than its recv. Throws CallFailed for other codes but success,
// which names the function and has MPI's reason.
void require(int code, const char* function);

}  // namespace lockstep::collective::mpi
