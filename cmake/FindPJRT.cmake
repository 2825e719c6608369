# Finds the header of PJRT's C API, which CMAKE_PREFIX_PATH names or tools/bootstrap installs. For tests it also finds the plugin for CPUs that tools/bootstrap installs, and the compiler
# for TPUs that `tools/bootstrap --tpu` installs. The build needs only the header: a plugin is loaded when it is first used.
file(GLOB _wheel ${PROJECT_SOURCE_DIR}/.deps/pjrt/lib/python3*/site-packages/xla_plugins/xla_cpu_pjrt)
find_path(PJRT_INCLUDE_DIR pjrt_c_api.h HINTS ${_wheel} PATH_SUFFIXES include include/xla/pjrt/c)
find_file(PJRT_CPU_PLUGIN xla_cpu_pjrt.so HINTS ${_wheel})
file(GLOB _wheel ${PROJECT_SOURCE_DIR}/.deps/tpu/lib/python3*/site-packages/libtpu)
find_file(PJRT_TPU_PLUGIN libtpu.so HINTS ${_wheel})

if(PJRT_INCLUDE_DIR)
  file(STRINGS ${PJRT_INCLUDE_DIR}/pjrt_c_api.h _version REGEX "define PJRT_API_(MAJOR|MINOR) +[0-9]+")
  string(REGEX MATCHALL "[0-9]+" _version "${_version}")
  list(JOIN _version "." PJRT_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PJRT REQUIRED_VARS PJRT_INCLUDE_DIR VERSION_VAR PJRT_VERSION)
