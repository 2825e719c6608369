# Settings that every target shares, and functions that turn a module into sources and a test program.

# lockstep_modules(VARIABLE kind): the modules of that kind, by src/modules.txt.
function(lockstep_modules variable kind)
  file(STRINGS ${PROJECT_SOURCE_DIR}/src/modules.txt lines REGEX "^[a-z_]+: ${kind}( |$)")
  list(TRANSFORM lines REPLACE ":.*" "")
  set(${variable} ${lines} PARENT_SCOPE)
  set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS src/modules.txt)
endfunction()

# lockstep_unity(NAME COUNT source...): with CMAKE_UNITY_BUILD up to COUNT of the sources are one translation unit. A file that
# includes torch takes 4 s before its first line of ours is read.
function(lockstep_unity name most)
  set(count 0)
  foreach(source IN LISTS ARGN)
    math(EXPR group "${count} / ${most}")
    math(EXPR count "${count} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${name}_${group})
  endforeach()
endfunction()

# lockstep_sources(VARIABLE module...): the modules' sources, without their tests.
function(lockstep_sources variable)
  set(sources)
  foreach(module IN LISTS ARGN)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${module}/*.cc)
    list(FILTER found EXCLUDE REGEX "_test\\.cc$")
    list(APPEND sources ${found})
    lockstep_unity(${module} 15 ${found})
    if(module STREQUAL kernels)  # Highway includes each of its files again, once an instruction set
      set_source_files_properties(${found} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
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

# lockstep_module_tests(LIBRARY module...): one test program a module, of the *_test.cc files that stand beside its code.
function(lockstep_module_tests library)
  foreach(module IN LISTS ARGN)
    file(GLOB_RECURSE tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${module}/*_test.cc)
    # The thread sanitizer does not follow a process with threads into a fork that starts threads again. Nor does it see
    # the barriers of LibTorch's OpenMP, between which operators compute on several threads.
    if(LOCKSTEP_SANITIZE STREQUAL "thread")
      list(FILTER tests EXCLUDE REGEX "/ops/(conv_pool|dense|pooling)_test\\.cc$")
      list(FILTER tests EXCLUDE REGEX "/(rendezvous|unauthenticated|limits|regroup)_test\\.cc$")
    endif()
    # XLA's threads are not instrumented.
    if(module MATCHES "^(pjrt|tpu)$" AND (NOT PJRT_CPU_PLUGIN OR LOCKSTEP_SANITIZE STREQUAL "thread"))
      set(tests)
    endif()
    if(tests)
      lockstep_test(${module}_test ${library} ${tests})
    endif()
  endforeach()
endfunction()

# lockstep_test(NAME LIBRARY source...): a GoogleTest program, one ctest entry. Several sources are compiled together.
function(lockstep_test name library)
  add_executable(${name} ${ARGN})
  lockstep_settings(${name})
  lockstep_unity(${name} 8 ${ARGN})
  # Tests compute little themselves, so they are compiled quickly; the library is compiled for speed.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${library} GTest::gtest GTest::gtest_main ${HWY_LIBRARY} nlohmann_json::nlohmann_json ZLIB::ZLIB)
  target_compile_definitions(${name} PRIVATE LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}" LOCKSTEP_BINARY_DIR="${PROJECT_BINARY_DIR}")
  if(library STREQUAL lockstep)
    lockstep_torch_program(${name})
  endif()
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
  target_link_libraries(${name} PRIVATE lockstep)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  lockstep_torch_program(${name})
endfunction()
