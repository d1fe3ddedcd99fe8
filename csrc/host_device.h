// Marks functions shared by host and device, inline on both; a host compiler sees only `inline`.
#pragma once

#ifdef __CUDACC__
#define OASES_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define OASES_HOST_DEVICE inline
#endif
