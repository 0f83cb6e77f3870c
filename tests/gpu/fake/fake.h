/* A CUDA driver for machines without GPUs, for tests alone: the functions that
 * src/memory/cuda_abi.h lists, in host memory, with the rules that the driver API reference gives
 * them. Code that breaks a rule fails here as it would on a GPU.
 *
 *   FAKE_CUDA_DEVICES=N    GPUs of the machine (4); CUDA_VISIBLE_DEVICES chooses and orders them
 *   FAKE_CUDA_HOST=NAME    another machine: its GPUs have other UUIDs
 *   FAKE_CUDA_STATE=PATH   what processes of one machine share (who holds how much memory)
 *   FAKE_CUDA_BYTES=N      memory of each GPU (8 GiB)
 *   FAKE_CUDA_FAIL=NAME:N:CODE,...    call N of a function gives CODE; "N+": each from N on
 *   FAKE_CUDA_DELAY=N      work in a stream waits up to N microseconds first
 *   FAKE_CUDA_LEGACY_DEATH=fault      what a process exported by legacy handle dies with it
 *
 * Device memory lies in ranges of its own between guards; other processes reach it through memfds.
 * What a real driver leaves undefined (reading what its owner freed) reads as poison here. */
#pragma once

#include "memory/cuda_abi.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The compiler compares what is defined here with the list that is called. */
#define XX(name, symbol, parameters) CUresult symbol parameters;
DRAY__CUDA_FUNCTIONS(XX)
DRAY__CUDA_OPTIONAL(XX)
#undef XX

enum {
    MAX_DEVICES = 32,
    GRANULE = 2 << 20,
    POISON_FRESH = 0xC7, /* what fresh memory holds: never zeros */
    POISON_FREED = 0xDB,
    FRESH_MAX = 16 << 20 /* larger allocations begin as zeros: tests are to be short */
};
#define HEAP_BYTES ((size_t)32 << 30) /* addresses of one GPU's allocations */

typedef struct range range;
typedef struct context context;
typedef struct event_cell event_cell;

/* ---- driver.c: devices, contexts, errors ----------------------------------------------------- */

struct context {
    int ordinal;  /* among the visible devices */
    int physical; /* among the machine's */
    int retained;
    int sticky; /* the error after which nothing works any more */
    uint8_t *heap;
    int heap_fd;
    CUstream legacy;  /* the default stream */
    CUstream streams; /* all of the context's */
};

/* Every function begins so: is the driver usable here, and does a test want this call to fail? */
CUresult fake_enter(const char *function);
#define ENTER(function)                                                                            \
    do {                                                                                           \
        CUresult entered = fake_enter(#function);                                                  \
        if (entered)                                                                               \
            return entered;                                                                        \
    } while (0)
/* The thread's current context; NULL with *result. */
context *fake_current(CUresult *result);
#define CURRENT(c)                                                                                 \
    CUresult current_result;                                                                       \
    context *c = fake_current(&current_result);                                                    \
    if (!c)                                                                                        \
    return current_result

context *fake_context(int ordinal); /* NULL: no such device */
int fake_ordinal(int physical);     /* -1: this process does not see it */
int fake_visible(void);
int fake_physical_count(void);
void fake_break(context *c, CUresult result);
uint64_t fake_number(const char *variable, uint64_t otherwise);
extern _Thread_local bool fake_in_host_function;

/* ---- machine.c: what processes share --------------------------------------------------------- */

uint64_t fake_id(void); /* never given twice on the machine */
uint64_t fake_start_of(pid_t pid);
bool fake_alive(pid_t pid, uint64_t start); /* not when it is a zombie, either */
/* Enters that this process holds an allocation; false: the GPU's memory is full. */
bool fake_hold(uint64_t id, int physical, uint64_t bytes, bool fresh);
void fake_drop(uint64_t id);
bool fake_held(uint64_t id, pid_t pid, uint64_t start);
uint64_t fake_used(int physical);
uint64_t fake_total(void);

/* ---- memory.c: addresses --------------------------------------------------------------------- */

typedef enum range_kind { RANGE_HEAP, RANGE_IMPORT, RANGE_MAPPING, RANGE_HOST } range_kind;

typedef struct allocation allocation; /* of cuMemCreate */

struct range {
    uintptr_t at;
    size_t bytes, asked;
    range_kind kind;
    int physical;         /* whose memory it is; -1: the host's */
    context *owner;       /* it was made in this one */
    uint64_t id;          /* of the allocation */
    uint64_t serial;      /* of this range of addresses */
    uint64_t read, write; /* GPUs that may, a bit each */
    size_t offset;        /* in its file */
    bool exported;        /* by a legacy handle */
    allocation *backing;  /* a mapping's */
    pid_t from;           /* an import's owner */
    uint64_t from_start;
    unsigned opens;
};

extern pthread_mutex_t fake_lock; /* ranges and allocations */

/* Under the lock. NULL: no memory lies there. */
range *fake_range_at(uintptr_t at);
range *fake_range_add(const range *r); /* NULL: no memory */
void fake_range_remove(range *r);
range *fake_range_import(uint64_t id, const context *owner);
/* Does the address belong to GPUs, mapped or not? */
bool fake_is_device_space(uintptr_t at);
void *fake_map_fixed(uintptr_t at, size_t bytes, int protection, int fd, size_t offset);
/* Addresses with guards, reachable by nobody; 0: none left. */
uintptr_t fake_reserve(size_t bytes, size_t alignment);
void fake_unreserve(uintptr_t at, size_t bytes);

/* May this GPU copy from, or to, these bytes? `device`: they must be a GPU's (or registered). */
CUresult fake_may(context *c, uintptr_t at, size_t bytes, bool write, bool device);
/* Frees everything that was allocated in a context that ends. */
void fake_memory_end(context *c);
void fake_imports_check(void);
int fake_handle_types(const allocation *backing); /* that it may be exported as */

/* ---- stream.c: work in order ----------------------------------------------------------------- */

typedef struct work work;
typedef CUresult (*work_fn)(context *c, void *argument);

/* Puts work at a stream's end; `argument` is copied. stream: NULL or 1: the default one. */
CUresult fake_submit(context *c, CUstream stream, work_fn run, const void *argument, size_t size);
CUresult fake_drain(context *c);                         /* waits for all of a context's streams */
context *fake_stream_owner(context *c, CUstream stream); /* NULL: it is none */
CUresult fake_stream_wait(context *c, CUstream stream);
void fake_streams_end(context *c);

/* ---- kernels.c ---------------------------------------------------------------------- */

/* One kernel, compiled as C: run(parameters) does one block, whose index and count are in
 * fake_block and fake_grid. */
typedef struct fake_kernel {
    const char *name;
    size_t bytes; /* of its one parameter */
    void (*run)(const void *parameter);
} fake_kernel;

extern const fake_kernel fake_kernels[];
extern const size_t fake_kernel_count;
/* Sets where the kernel's code finds its block. */
void fake_kernel_place(unsigned int block, unsigned int blocks);
