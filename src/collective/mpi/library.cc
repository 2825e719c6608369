#include "collective/mpi/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <span>
#include <vector>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::mpi {
namespace {

constexpr const char* kVariable = "LOCKSTEP_MPI_LIBRARY";

// Constants by MPI 5's table (mpi_abi.h), by the headers of MPICH and Open MPI; in the order of DType and of ReduceOp.
constexpr Constants kOfMpi5{.world = 0x101,
                            .errors_return = 0x143,
                            .thread_multiple = 4096,
                            .dtypes = {0x210, 0x214, 0x248, 0x248, 0x250, 0x258, 0x241, 0x240, 0x248, 0x241},
                            .ops = {0x21, 0x21, 0x22, 0x23, 0x24}};
constexpr Constants kOfMpich{.world = 0x44000000,
                             .errors_return = 0x54000001,
                             .error_truncate = 14,
                             .dtypes = {0x4c00040a, 0x4c00080b, 0x4c000238, 0x4c000238, 0x4c000439, 0x4c00083a,
                                        0x4c00013b, 0x4c000137, 0x4c000238, 0x4c00013b},
                             .ops = {0x58000003, 0x58000003, 0x58000002, 0x58000001, 0x58000004}};

Constants constants_of_open_mpi(const OpenedLibrary& opened) {
  const auto address = [&](const char* name) {
    const void* symbol = nullptr;
    opened.find(name, symbol);
    return reinterpret_cast<Handle>(symbol);
  };
  const auto i16 = address("ompi_mpi_int16_t"), u8 = address("ompi_mpi_uint8_t"), sum = address("ompi_mpi_op_sum");
  return {.world = address("ompi_mpi_comm_world"),
          .errors_return = address("ompi_mpi_errors_return"),
          .dtypes = {address("ompi_mpi_float"), address("ompi_mpi_double"), i16, i16, address("ompi_mpi_int32_t"),
                     address("ompi_mpi_int64_t"), u8, address("ompi_mpi_int8_t"), i16, u8},
          .ops = {sum, sum, address("ompi_mpi_op_min"), address("ompi_mpi_op_max"), address("ompi_mpi_op_prod")}};
}

Constants constants_of(const OpenedLibrary& opened) {
  constexpr std::uintptr_t kFirst = 1, kLast = ~std::uintptr_t{0};
  int major = 0, minor = 0;
  using AbiVersion = int(int* major, int* minor);
  const auto abi_version = reinterpret_cast<AbiVersion*>(opened.find_or_null("MPI_Abi_get_version"));
  if (abi_version != nullptr) abi_version(&major, &minor);
  const bool is_open_mpi = major < 1 && opened.find_or_null("ompi_mpi_comm_world") != nullptr;
  auto constants = major >= 1 ? kOfMpi5 : is_open_mpi ? constants_of_open_mpi(opened) : kOfMpich;
  constants.in_place = reinterpret_cast<void*>(major >= 1 || is_open_mpi ? kFirst : kLast);
  return constants;
}

enum class Launcher : std::uint8_t { none, open_mpi, mpich, other };

bool is_set(const char* variable) { return std::getenv(variable) != nullptr; }

// `other` starts processes of any MPI, as Slurm does.
Launcher launcher() {
  if (is_set("OMPI_COMM_WORLD_SIZE")) return Launcher::open_mpi;
  if (is_set("PMIX_RANK")) return Launcher::other;
  if (is_set("PMI_RANK")) return is_set("MPI_LOCALNRANKS") ? Launcher::mpich : Launcher::other;
  return is_set("PMI_ID") ? Launcher::other : Launcher::none;
}

std::vector<const char*> names_for(Launcher by) {
  if (const char* const given = std::getenv(kVariable)) return {given};
  std::vector<const char*> names;
  if (by != Launcher::open_mpi) names = {"libmpi_abi.so.1", "libmpi.so.12", "libmpich.so.12"};
  if (by != Launcher::mpich) names.push_back("libmpi.so.40");
  names.push_back("libmpi.so");
  return names;
}

// The library's words for itself, up to the first comma or line.
std::string product_of(const Library& found) {
  std::string words(8192, '\0');
  int length = 0;
  found.MPI_Get_library_version(words.data(), &length);
  words.resize(std::min(words.find_first_of(",\n"), static_cast<std::size_t>(std::max(length, 0))));
  std::erase(words, ':');
  words.erase(
      std::unique(words.begin(), words.end(), [](char a, char b) { return std::isspace(a) && std::isspace(b); }),
      words.end());
  std::replace(words.begin(), words.end(), '\t', ' ');
  return words;
}

// MPI_Init ends a process that another MPI's launcher has started.
void require_pair(const Library& found, Launcher by) {
  const bool is_open_mpi = found.product.starts_with("Open MPI");
  if (by == Launcher::open_mpi && !is_open_mpi) {
    throw InvalidArgument(text("the MPI library is ", found.product, ", but Open MPI's mpirun started this process; ",
                               "start it with the library's own mpiexec, or let ", kVariable,
                               " name Open MPI's library (libmpi.so.40)"));
  }
  if (by == Launcher::mpich && is_open_mpi) {
    throw InvalidArgument(text("the MPI library is ", found.product, ", but MPICH's mpiexec started this process; ",
                               "start it with Open MPI's mpirun, or let ", kVariable,
                               " name MPICH's library (libmpi.so.12)"));
  }
}

Library functions_of(const OpenedLibrary& opened) {
  Library found;
#define LOCKSTEP_FIND(name, ...) opened.find(#name, found.name)
  LOCKSTEP_MPI_FUNCTIONS(LOCKSTEP_FIND);
#undef LOCKSTEP_FIND
  found.constants = constants_of(opened);
  found.product = product_of(found);
  return found;
}

bool is_initialized(const Library& found) {
  int flag = 0;
  found.MPI_Initialized(&flag);
  return flag != 0;
}

// A program may have started MPI by itself, also without a launcher: its library is in the process already.
Library load() {
  const auto by = launcher();
  const auto names = names_for(by);
  const std::string name = "the MPI library";
  if (by == Launcher::none) {
    constexpr const char* kNone =
        "no launcher of MPI started this process: the backend \"mpi\" needs mpirun, mpiexec, or srun --mpi";
    try {
      const auto found = functions_of(OpenedLibrary(name, names, kNone, RTLD_GLOBAL | RTLD_NOLOAD));
      if (is_initialized(found)) return found;
    } catch (const InvalidArgument&) {
    }
    throw InvalidArgument(kNone);
  }
  const auto missing = text("there is no MPI library, which ", kVariable, " can name");
  auto found = functions_of(OpenedLibrary(name, names, missing, RTLD_GLOBAL));
  if (!is_initialized(found)) require_pair(found, by);
  return found;
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

void require(int code, const char* function) {
  if (code == 0) return;
  std::array<char, 8192> words{};
  int length = 0, error_class = 0;
  library().MPI_Error_string(code, words.data(), &length);
  library().MPI_Error_class(code, &error_class);
  const auto message = text(function, ": ", words.data());
  if (error_class == library().constants.error_truncate) {
    throw InvalidArgument(text("the ranks' calls differ: a message is longer than its recv: ", message));
  }
  throw CallFailed(message);
}

}  // namespace lockstep::collective::mpi
