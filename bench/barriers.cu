// A control for bench/sanitize.py: what racecheck says of a byte that is handed over by barriers of a whole block.
//
// As a compiler dispatches groups of warps: the first group writes what the second shall do, all threads meet, the
// second group reads it. Nothing else is shared. With an argument the first group meets before that at a barrier of its
// own, which orders nothing between the groups and takes nothing from the barriers of all.
#include <cstdio>

const unsigned WORK = 0, END = 1;

__device__ void all_meet() { asm volatile("barrier.sync 1;" ::: "memory"); }

// Two groups of 128 threads; out [256]: where each has been.
template <bool GROUP_MEETS> __global__ void handed_over(unsigned* out) {
  __shared__ volatile unsigned todo;
  if (threadIdx.x < 128) {
    if (GROUP_MEETS) asm volatile("bar.sync 0, 128;" ::: "memory");
    todo = WORK;
    all_meet();  // what to do is known
    out[threadIdx.x] = 1;
    all_meet();  // it is done
    todo = END;
    all_meet();
  } else {
    all_meet();
    while (todo == WORK) {
      out[threadIdx.x] = 2;
      all_meet();
      all_meet();
    }
  }
}

int main(int count, char**) {
  unsigned *out, seen[256];
  cudaMalloc(&out, sizeof(seen));
  if (count > 1) handed_over<true><<<4, 256>>>(out);
  else handed_over<false><<<4, 256>>>(out);
  cudaError_t status = cudaMemcpy(seen, out, sizeof(seen), cudaMemcpyDefault);
  for (int i = 0; i < 256; i++)
    if (status != cudaSuccess || seen[i] != (i < 128 ? 1 : 2)) return printf("wrong: %s\n", cudaGetErrorString(status)), 1;
  printf("ran: all\n");
}
