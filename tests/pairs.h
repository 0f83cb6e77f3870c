/* The pairs of memory kinds that every suite about copies is stamped for: XX(from, to). A new kind
 * is added here. */
#pragma once

#define PAIRS(XX)                                                                                  \
    XX(HOST, HOST)                                                                                 \
    XX(HOST, SHARED)                                                                               \
    XX(HOST, PINNED)                                                                               \
    XX(HOST, CUDA)                                                                                 \
    XX(HOST, FILE)                                                                                 \
    XX(SHARED, HOST)                                                                               \
    XX(SHARED, SHARED)                                                                             \
    XX(SHARED, PINNED)                                                                             \
    XX(SHARED, CUDA)                                                                               \
    XX(SHARED, FILE)                                                                               \
    XX(PINNED, HOST)                                                                               \
    XX(PINNED, SHARED)                                                                             \
    XX(PINNED, PINNED)                                                                             \
    XX(PINNED, CUDA)                                                                               \
    XX(PINNED, FILE)                                                                               \
    XX(CUDA, HOST)                                                                                 \
    XX(CUDA, SHARED)                                                                               \
    XX(CUDA, PINNED)                                                                               \
    XX(CUDA, CUDA)                                                                                 \
    XX(CUDA, FILE)                                                                                 \
    XX(FILE, HOST)                                                                                 \
    XX(FILE, SHARED)                                                                               \
    XX(FILE, PINNED)                                                                               \
    XX(FILE, CUDA)                                                                                 \
    XX(FILE, FILE)
