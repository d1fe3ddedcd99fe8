#pragma once
#include <cstdint>
namespace oases::cuda { void occupy(int64_t ns, void* stream); }
