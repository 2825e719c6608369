# Settings that every target shares, and functions that turn a module into sources and a test program.

# src/modules.txt as variables:
# LIBRARIES_plain   and so for each kind of library
# MODULES_OF_name   of each library; modules and their parts
# LOCKSTEP_MODULES   all of them
# LIBRARIES_BELOW_name   of each library: those whose modules its modules include
set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS src/modules.txt)
file(STRINGS ${PROJECT_SOURCE_DIR}/src/modules.txt _lines REGEX "^[a-z]")
foreach(_line IN LISTS _lines)
  string(REGEX MATCHALL "[a-z_/]+" _words ${_line})
  list(POP_FRONT _words _name _library)
  if(_line MATCHES "=")
    list(APPEND LIBRARIES_${_library} ${_name})
    continue()
  endif()
  set(_library_of_${_name} ${_library})
  list(APPEND MODULES_OF_${_library} ${_name})
  list(APPEND LOCKSTEP_MODULES ${_name})
  foreach(_used IN LISTS _words)
    list(APPEND LIBRARIES_BELOW_${_library} ${_library_of_${_used}})
  endforeach()
  list(REMOVE_ITEM LIBRARIES_BELOW_${_library} ${_library})
  list(REMOVE_DUPLICATES LIBRARIES_BELOW_${_library})
endforeach()

# lockstep_files(VARIABLE module PATTERN): the module's files of that name, in all its folders but its parts.
function(lockstep_files variable module pattern)
  file(GLOB_RECURSE found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${module}/${pattern})
  set(parts ${LOCKSTEP_MODULES})
  list(FILTER parts INCLUDE REGEX "^${module}/")
  foreach(part IN LISTS parts)
    list(FILTER found EXCLUDE REGEX "/src/${part}/")
  endforeach()
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

# lockstep_unity(NAME SIZE source...): with CMAKE_UNITY_BUILD the sources are compiled in as few groups as are needed for none to have more than about
# SIZE bytes. The groups are of equal size, so that each core of a machine has work to the end of a build.
function(lockstep_unity name size)
  set(total 0)
  foreach(source IN LISTS ARGN)
    file(SIZE ${source} bytes)
    math(EXPR total "${total} + ${bytes}")
  endforeach()
  math(EXPR groups "(${total} + ${size} - 1) / ${size}")
  set(before 0)
  foreach(source IN LISTS ARGN)
    file(SIZE ${source} bytes)
    math(EXPR group "(${before} + ${bytes} / 2) * ${groups} / ${total}")  # in which the source's middle lies
    math(EXPR before "${before} + ${bytes}")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${name}_${group})
  endforeach()
endfunction()

# lockstep_sources(VARIABLE library): the sources of the library's modules, without their tests.
function(lockstep_sources variable library)
  set(sources)
  set(kernels)
  foreach(module IN LISTS MODULES_OF_${library})
    lockstep_files(found ${module} *.cc)
    list(FILTER found EXCLUDE REGEX "_test\\.cc$|${LOCKSTEP_LEFT_OUT}")
    if(module STREQUAL kernels)
      set(kernels ${found})
    else()
      list(APPEND sources ${found})
    endif()
  endforeach()
  lockstep_unity(${library} ${LOCKSTEP_UNITY_BYTES} ${sources})
  # Highway includes each file again, once an instruction set: without SSSE3, so that a processor that has SSSE3 and not SSE4 uses plain loops.
  set_source_files_properties(${kernels} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON COMPILE_OPTIONS
    "$<IF:$<BOOL:${LOCKSTEP_NATIVE_KERNELS}>,-march=native;-ffp-contract=off;-DHWY_COMPILE_ONLY_STATIC,-DHWY_DISABLED_TARGETS=HWY_SSSE3>")
  set(${variable} ${sources} ${kernels} PARENT_SCOPE)
endfunction()

# lockstep_plain_library(NAME): a static library of modules without torch. What links it links lockstep_core after it.
function(lockstep_plain_library name)
  lockstep_sources(sources ${name})
  add_library(${name} STATIC ${sources})
  lockstep_settings(${name})
  target_link_libraries(${name} PRIVATE nlohmann_json::nlohmann_json)
endfunction()

# lockstep_torch_library(NAME): a shared library of modules with torch. All share the precompiled header of the first, `lockstep`.
function(lockstep_torch_library name)
  lockstep_sources(sources ${name})
  add_library(${name} SHARED ${sources})
  set_target_properties(${name} PROPERTIES DEFINE_SYMBOL "" SOVERSION 0 INSTALL_RPATH $ORIGIN)
  lockstep_settings(${name})
  if(name STREQUAL lockstep)
    target_precompile_headers(${name} PRIVATE cmake/torch_pch.h)
  else()
    target_precompile_headers(${name} REUSE_FROM lockstep)
  endif()
  set(contained)
  foreach(below IN LISTS LIBRARIES_BELOW_${name})
    list(APPEND contained ${LIBRARIES_BELOW_${below}})
  endforeach()
  foreach(below IN LISTS LIBRARIES_BELOW_${name})
    if(below IN_LIST LIBRARIES_torch)
      target_link_libraries(${name} PUBLIC ${below})
    elseif(NOT below IN_LIST contained)
      target_link_libraries(${name} PRIVATE "$<LINK_LIBRARY:WHOLE_ARCHIVE,${below}>")
    endif()
  endforeach()
  target_link_libraries(${name} PRIVATE nlohmann_json::nlohmann_json ZLIB::ZLIB)
endfunction()

function(lockstep_settings target)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  set_target_properties(${target} PROPERTIES UNITY_BUILD_MODE GROUP)
  # g++ 12 sees overflows that are none in inlined string concatenation (GCC bug 105651).
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow -Wno-array-bounds -Wno-restrict>)
  if(CMAKE_UNITY_BUILD)  # whose files g++ takes for headers, in which no type of an unnamed namespace may be a member
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
  # g++ would spend a tenth of its time on looking for memory that can be freed.
  target_compile_options(${target} PRIVATE "$<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=1500000>")
  # -fno-math-errno lets the compiler vectorize square roots; nothing here reads errno after mathematics.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers -Werror
    -fno-math-errno)
  # clang is for the fuzzers, and has other words for unrolling.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:Clang>:-Wno-unknown-pragmas>)
  if(LOCKSTEP_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
      $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)  # as above
    # Under sanitizers it is their library that calls dlopen, and of the program's two kinds of path it only follows RPATH.
    target_link_options(${target} PUBLIC -fsanitize=${LOCKSTEP_SANITIZE} -Wl,--disable-new-dtags)
  endif()
endfunction()

# lockstep_module_tests(LIBRARY): one test program a module, of the *_test.cc files that stand beside its code.
function(lockstep_module_tests library)
  foreach(module IN LISTS MODULES_OF_${library})
    lockstep_files(tests ${module} *_test.cc)
    get_filename_component(name ${module} NAME)
    # The thread sanitizer does not follow a process with threads into a fork that starts threads again. Nor does it see
    # the barriers of LibTorch's OpenMP, between which operators compute on several threads.
    if(LOCKSTEP_SANITIZE STREQUAL "thread")
      list(FILTER tests EXCLUDE REGEX "/ops/(conv_pool|dense|pooling)_test\\.cc$")
      list(FILTER tests EXCLUDE REGEX "/(rendezvous|unauthenticated|limits|regroup)_test\\.cc$")
    endif()
    # XLA's threads are not instrumented.
    if(module MATCHES "^tpu(/pjrt)?$" AND (NOT PJRT_CPU_PLUGIN OR LOCKSTEP_SANITIZE STREQUAL "thread"))
      set(tests)
    endif()
    if(tests)
      lockstep_test(${name}_test ${library} ${tests})
    endif()
  endforeach()
endfunction()

# lockstep_test(NAME LIBRARY source...): a GoogleTest program, one ctest entry. Several sources are compiled together.
function(lockstep_test name library)
  add_executable(${name} ${ARGN})
  lockstep_settings(${name})
  set(count 0)
  foreach(source IN LISTS ARGN)
    math(EXPR group "${count} / 8")
    math(EXPR count "${count} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${name}_${group})
  endforeach()
  # Tests compute little themselves, so they are compiled quickly; the library is compiled for speed.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${library} GTest::gtest GTest::gtest_main ${HWY_LIBRARY} nlohmann_json::nlohmann_json ZLIB::ZLIB)
  if(library IN_LIST LIBRARIES_plain)
    target_link_libraries(${name} PRIVATE lockstep_core)
  else()
    lockstep_torch_program(${name})
  endif()
  target_compile_definitions(${name} PRIVATE LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}" LOCKSTEP_BINARY_DIR="${PROJECT_BINARY_DIR}")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 900 LABELS quick PROCESSORS 2)
  if(LOCKSTEP_SANITIZE)
    set(known ${PROJECT_SOURCE_DIR}/cmake/sanitizers)
    set_tests_properties(${name} PROPERTIES ENVIRONMENT
      "TSAN_OPTIONS=suppressions=${known}/libtorch_tsan.txt die_after_fork=0;LSAN_OPTIONS=suppressions=${known}/libtorch_lsan.txt")
  endif()
endfunction()

# A program of ours that includes torch: it shares the library's precompiled header, which asks for the same code model.
function(lockstep_torch_program name)
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name} PRIVATE -fPIC)
  target_precompile_headers(${name} REUSE_FROM lockstep)
endfunction()

# Each test is in one of three tiers, which are labels of ctest. `quick`: modules, and jobs whose ranks are threads. `test`: each
# launcher, and each mechanism that needs processes, once. `full`: everything else. A test of lockstep_test is quick unless it is
# named here.
#
# lockstep_tier(TIER test...): these tests are in that tier.
function(lockstep_tier tier)
  set_tests_properties(${ARGN} PROPERTIES LABELS ${tier})
endfunction()

# lockstep_waits(test...): tests that wait more than they compute. Two of them run at a time, others have the machine to themselves.
function(lockstep_waits)
  set_tests_properties(${ARGN} PROPERTIES PROCESSORS 1)
endfunction()

# lockstep_full(NAME case... [ROUNDS case...]): these cases of the GoogleTest program NAME, as in --gtest_filter, are in the tier `full`
# alone, where they are the test NAME_full. Those after ROUNDS are in both: of their random faults NAME makes one round, NAME_full all.
function(lockstep_full name)
  cmake_parse_arguments(PARSE_ARGV 1 these "" "" ROUNDS)
  list(JOIN these_UNPARSED_ARGUMENTS ":" cases)
  list(JOIN these_ROUNDS ":" rounds)
  set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT "GTEST_FILTER=-${cases}" LOCKSTEP_FAULT_ROUNDS=1)
  get_test_property(${name} PROCESSORS processors)
  add_test(NAME ${name}_full COMMAND ${name})
  set_tests_properties(${name}_full PROPERTIES TIMEOUT 900 LABELS full PROCESSORS ${processors} ENVIRONMENT "GTEST_FILTER=${cases}:${rounds}")
endfunction()

# lockstep_drawn(NAME TEST FULL): the programs that NAME draws by seeds: TEST of them in its tier, FULL of them as NAME_full.
function(lockstep_drawn name test full)
  set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT LOCKSTEP_PROGRAMS=${test})
  add_test(NAME ${name}_full COMMAND ${name})
  set_tests_properties(${name}_full PROPERTIES TIMEOUT 900 LABELS full PROCESSORS 2 ENVIRONMENT LOCKSTEP_PROGRAMS=${full})
endfunction()

# lockstep_job_test(NAME CLASS SCRIPT argument...): jobs of processes, by a script of Python. The tests of the script's class CLASS
# are in the tier `test`. Those of its class MoreCLASS, if any, are in the tier `full`, as the test NAME_full.
function(lockstep_job_test name class script)
  set(command /usr/bin/python3 ${PROJECT_SOURCE_DIR}/tests/${script} ${ARGN})
  add_test(NAME ${name} COMMAND ${command} ${class})
  set_tests_properties(${name} PROPERTIES TIMEOUT 900 LABELS test)
  file(STRINGS ${PROJECT_SOURCE_DIR}/tests/${script} more REGEX "^class More${class}\\(")
  if(more)
    add_test(NAME ${name}_full COMMAND ${command} More${class})
    set_tests_properties(${name}_full PROPERTIES TIMEOUT 900 LABELS full)
  endif()
endfunction()

# lockstep_test_program(NAME): tests/NAME.cc, a program that jobs of tests run.
function(lockstep_test_program name)
  add_executable(${name} ${name}.cc)
  lockstep_settings(${name})
  target_link_libraries(${name} PRIVATE lockstep_all)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  lockstep_torch_program(${name})
endfunction()
