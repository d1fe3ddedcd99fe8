// Marks functions that host and device share, inline on both; the compiler of the host sees nothing else of
// it.
#pragma once

#ifdef __CUDACC__
#define OASES_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define OASES_HOST_DEVICE inline
#endif
