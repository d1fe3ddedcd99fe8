#!/bin/sh
# Builds the C++ tests with CMake and runs them: run.sh PYTHON BUILD_FOLDER [thread|address]
set -eu
python=$1 folder=$2 sanitizer=${3:-}

has_gtest() { printf '#include <gtest/gtest.h>\n' | c++ -E -x c++ - >/dev/null 2>&1; }
if ! has_gtest || ! command -v cmake >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        (apt-get update && apt-get install -y libgtest-dev cmake) >/dev/null 2>&1 || true
    fi
fi
if ! has_gtest || ! command -v cmake >/dev/null; then
    echo "C++ tests skipped: GoogleTest or CMake is missing; install libgtest-dev and cmake"
    exit 0
fi
mkdir -p "$folder"
cmake -S . -B "$folder" -DPython_EXECUTABLE="$(realpath -s "$python")" -DOASES_SANITIZE="$sanitizer" >"$folder.log" 2>&1 ||
    { cat "$folder.log"; exit 1; }
cmake --build "$folder" --parallel "$(getconf _NPROCESSORS_ONLN)" >>"$folder.log" 2>&1 || { tail -50 "$folder.log"; exit 1; }
# In one process: each would load torch, which takes longer than its tests.
TSAN_OPTIONS="suppressions=$PWD/cpp_tests/thread.supp" \
    ASAN_OPTIONS="detect_leaks=0" timeout 600 "$folder/oases_tests" --gtest_brief=1
