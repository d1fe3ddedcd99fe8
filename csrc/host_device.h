// Marks functions that host and device share; the compiler of the host sees nothing of it.
#pragma once

#ifdef __CUDACC__
#define OASES_HOST_DEVICE __host__ __device__
#else
#define OASES_HOST_DEVICE
#endif
