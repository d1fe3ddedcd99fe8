// Joins threads in destructors. Python calls these with its lock held, which a thread may need to free its last tensors.
#pragma once

#include <thread>

namespace oases {

// extension.h replaces it by one that gives up Python's lock meanwhile.
inline void (*join_thread)(std::thread&) = [](std::thread& thread) { thread.join(); };

}  // namespace oases
