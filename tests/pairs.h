/* The pairs of memory kinds that every suite about copies is stamped for: XX(from, to). A new kind
 * is added here. */
#ifndef DRAY_TESTS_PAIRS_H
#define DRAY_TESTS_PAIRS_H

#define PAIRS(XX)                                                                                  \
    XX(HOST, HOST)                                                                                 \
    XX(HOST, SHARED)                                                                               \
    XX(HOST, FILE)                                                                                 \
    XX(SHARED, HOST)                                                                               \
    XX(SHARED, SHARED)                                                                             \
    XX(SHARED, FILE)                                                                               \
    XX(FILE, HOST)                                                                                 \
    XX(FILE, SHARED)                                                                               \
    XX(FILE, FILE)

/* Of GPUs' memory, and of host memory that they reach. */
#define GPU_PAIRS(XX)                                                                              \
    XX(CUDA, CUDA)                                                                                 \
    XX(CUDA, HOST)                                                                                 \
    XX(CUDA, SHARED)                                                                               \
    XX(CUDA, PINNED)                                                                               \
    XX(CUDA, FILE)                                                                                 \
    XX(HOST, CUDA)                                                                                 \
    XX(SHARED, CUDA)                                                                               \
    XX(PINNED, CUDA)                                                                               \
    XX(FILE, CUDA)                                                                                 \
    XX(PINNED, PINNED)                                                                             \
    XX(PINNED, HOST)                                                                               \
    XX(HOST, PINNED)                                                                               \
    XX(PINNED, FILE)                                                                               \
    XX(FILE, PINNED)

#endif
