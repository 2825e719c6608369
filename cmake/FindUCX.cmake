# The UCX that CMAKE_PREFIX_PATH names, else the wheel in the folder LOCKSTEP_WHEELS. Only headers are needed to build: the
# library is loaded when the backend "ucx" is first used, here from UCX_LIBRARY's folder, installed where the system finds it.
set(_wheels ${LOCKSTEP_WHEELS}/libucx)
find_path(UCX_INCLUDE_DIR ucp/api/ucp.h HINTS ${_wheels} PATH_SUFFIXES include)
find_library(UCX_LIBRARY ucp HINTS ${_wheels} PATH_SUFFIXES lib)

if(UCX_INCLUDE_DIR)
  file(STRINGS ${UCX_INCLUDE_DIR}/ucp/api/ucp_version.h _version REGEX "define UCP_API_(MAJOR|MINOR) +[0-9]+")
  string(REGEX MATCHALL "[0-9]+" _version "${_version}")
  list(JOIN _version "." UCX_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(UCX REQUIRED_VARS UCX_LIBRARY UCX_INCLUDE_DIR VERSION_VAR UCX_VERSION)
