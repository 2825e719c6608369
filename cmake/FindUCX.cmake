# The UCX that CMAKE_PREFIX_PATH names, else the wheel that tools/bootstrap put into .deps/. Only headers are needed here:
# the library is loaded when the backend "ucx" is first used, as UCX_LIBRARY or where the system finds it.
file(GLOB _wheels ${PROJECT_SOURCE_DIR}/.deps/python/lib/python3*/site-packages/libucx)
find_path(UCX_INCLUDE_DIR ucp/api/ucp.h HINTS ${_wheels} PATH_SUFFIXES include)
find_library(UCX_LIBRARY ucp HINTS ${_wheels} PATH_SUFFIXES lib)

if(UCX_INCLUDE_DIR)
  file(STRINGS ${UCX_INCLUDE_DIR}/ucp/api/ucp_version.h _version REGEX "define UCP_API_(MAJOR|MINOR) +[0-9]+")
  string(REGEX MATCHALL "[0-9]+" _version "${_version}")
  list(JOIN _version "." UCX_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(UCX REQUIRED_VARS UCX_LIBRARY UCX_INCLUDE_DIR VERSION_VAR UCX_VERSION)
