/* Measures the bare operations that other benchmarks are compared with, on this machine at this
 * time. */
#include "bench.h"

int main(int argc, char **argv)
{
    bench *b = bench_open(argc, argv, "limits");
    size_t bytes = bench_quick(b) ? 4u << 20 : 256u << 20;
    double plain = bench_memcpy(b, bytes);
    bench_row(b, "memcpy, private memory", plain, "B/s", 0, 0);
    bench_row(b, "memcpy, into shared memory", bench_memcpy_shared(b, bytes), "B/s", plain, 0);
    bench_row(b, "echo of 200 B, Unix socket pair", bench_echo(b, 200), "s", 0, 0);
    return bench_close(b);
}
