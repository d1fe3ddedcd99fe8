// What the extensions of Python that are built against torch have in common.
#pragma once

#include <pybind11/pybind11.h>

#include "join_thread.h"

// Passed without quotes, because build systems quote differently.
#define OASES_TEXT_OF(x) #x
#define OASES_TEXT(x) OASES_TEXT_OF(x)

namespace oases {

// oases_staged/built.py finds this text in an extension's file before the file is loaded.
__attribute__((used)) static const char kBuilt[] =
    "oases was built against torch " OASES_TEXT(OASES_TORCH_VERSION);

// Has destructors that join threads give up Python's lock meanwhile.
inline void join_threads_without_lock() {
  join_thread = [](std::thread& thread) {
    if (!Py_IsInitialized() || !PyGILState_Check()) return thread.join();
    const pybind11::gil_scoped_release released;
    thread.join();
  };
}

}  // namespace oases
