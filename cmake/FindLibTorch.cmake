# LibTorch::cpu: the LibTorch that CMAKE_PREFIX_PATH names, else the wheel in the folder LOCKSTEP_WHEELS.
# find_package(Torch) is not used: on the wheel it is fatal without a CUDA toolkit.
set(_wheels ${LOCKSTEP_WHEELS}/torch)
find_path(LibTorch_INCLUDE_DIR torch/csrc/api/include/torch/torch.h HINTS ${_wheels} PATH_SUFFIXES include)
find_library(LibTorch_CPU_LIBRARY torch_cpu HINTS ${_wheels} PATH_SUFFIXES lib)
find_library(LibTorch_C10_LIBRARY c10 HINTS ${_wheels} PATH_SUFFIXES lib)

if(LibTorch_INCLUDE_DIR)
  file(STRINGS ${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h _version REGEX "TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX MATCHALL "[0-9]+" _version "${_version}")
  list(JOIN _version "." LibTorch_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_INCLUDE_DIR VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "Name your LibTorch with -DCMAKE_PREFIX_PATH=DIR (in a checkout of Lockstep: run tools/bootstrap)")

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  get_filename_component(_lib ${LibTorch_CPU_LIBRARY} DIRECTORY)
  file(GLOB _nvidia ${_lib}/../../nvidia/cu13/lib)
  add_library(LibTorch::cpu INTERFACE IMPORTED)
  # After the system's own folders: the wheel also carries headers of protobuf and fmt, of other versions.
  target_compile_options(LibTorch::cpu INTERFACE "SHELL:-idirafter ${LibTorch_INCLUDE_DIR}"
    "SHELL:-idirafter ${LibTorch_INCLUDE_DIR}/torch/csrc/api/include")
  # at::parallel_for is a template that works in parallel only where its caller is compiled for OpenMP. The runtime must be
  # LibTorch's own, GCC's: the wheel brings one. Clang compiles for no other runtime than LLVM's, and told that it is GCC's
  # leaves OpenMP out: at::parallel_for works then, in one thread.
  target_compile_options(LibTorch::cpu INTERFACE $<IF:$<CXX_COMPILER_ID:Clang>,-fopenmp=libgomp,-fopenmp>)
  file(GLOB _openmp ${_lib}/libgomp*.so*)
  if(NOT _openmp)
    find_package(OpenMP REQUIRED)
    set(_openmp ${OpenMP_CXX_LIBRARIES})
  endif()
  set(_libraries ${LibTorch_CPU_LIBRARY} ${LibTorch_C10_LIBRARY} ${_openmp})
  set(_folders ${_lib} ${_nvidia})
  if(LOCKSTEP_CUDA)
    find_library(LibTorch_CUDA_LIBRARY torch_cuda HINTS ${_lib} REQUIRED NO_DEFAULT_PATH)
    find_library(LibTorch_C10_CUDA_LIBRARY c10_cuda HINTS ${_lib} REQUIRED NO_DEFAULT_PATH)
    list(APPEND _libraries ${LibTorch_CUDA_LIBRARY} ${LibTorch_C10_CUDA_LIBRARY})
    file(GLOB _wheel_libraries ${_lib}/../../nvidia/*/lib)
    list(APPEND _folders ${_wheel_libraries})
    # The build needs only the headers of CUDA's runtime: those that tools/bootstrap installs, else a toolkit's.
    set(_cuda_headers ${_lib}/../../nvidia/cu13/include)
    if(NOT EXISTS ${_cuda_headers}/crt)
      find_package(CUDAToolkit REQUIRED)
      set(_cuda_headers ${CUDAToolkit_INCLUDE_DIRS})
    endif()
    target_compile_options(LibTorch::cpu INTERFACE "SHELL:-idirafter ${_cuda_headers}")
    target_link_options(LibTorch::cpu INTERFACE -Wl,--allow-shlib-undefined)
  endif()
  # LibTorch registers its kernels when it is loaded, so it must be linked even where no symbol of it is named.
  target_link_libraries(LibTorch::cpu INTERFACE -Wl,--no-as-needed ${_libraries} -Wl,--as-needed)
  # CMake tells programs the folder of the libraries above; the wheel's libraries find their own.
  foreach(_folder IN LISTS _folders)
    target_link_options(LibTorch::cpu INTERFACE -Wl,-rpath-link,${_folder})
  endforeach()
endif()
