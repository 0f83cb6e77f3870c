/* A CUDA driver for machines without GPUs, for tests alone. It has the functions that
 * src/memory/cuda_abi.h lists, in host memory, with the rules that the driver API reference gives
 * them. Code that breaks a rule fails here as it would on a GPU.
 *
 *   FAKE_CUDA_DEVICES=N    GPUs of the machine (4); CUDA_VISIBLE_DEVICES chooses and orders them
 *   FAKE_CUDA_HOST=NAME    another machine: its GPUs have other UUIDs
 *   FAKE_CUDA_STATE=PATH   the state that processes of one machine share: the memory of each
 *   FAKE_CUDA_BYTES=N      memory of each GPU (8 GiB)
 *   FAKE_CUDA_FAIL=NAME:N:CODE,...    call N of a function gives CODE; "N+": each from N on
 *   FAKE_CUDA_DELAY=N      work in a stream waits up to N microseconds first
 *   FAKE_CUDA_LEGACY_DEATH=fault      memory exported by legacy handle dies with its process
 *
 * Device memory lies in ranges of its own between guards. Other processes reach it through memfds.
 * Where a real driver leaves the result undefined (reads of memory that its owner freed), the bytes
 * are poison here. */
#pragma once

#include "memory/cuda_abi.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The compiler compares the definitions here with the list of the functions that are called. */
#define XX(name, symbol, parameters) CUresult symbol parameters;
DRAY__CUDA_FUNCTIONS(XX)
DRAY__CUDA_OPTIONAL(XX)
#undef XX

enum {
    MAX_DEVICES = 32,
    GRANULE = 2 << 20,
    POISON_FRESH = 0xC7, /* the content of fresh memory, which is never zeros */
    POISON_FREED = 0xDB,
    FRESH_MAX = 16 << 20 /* larger allocations begin as zeros, to keep tests short */
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

/* Every function begins with this. Returns an error when the driver is not usable here, or when a
 * test wants this call to fail. */
CUresult fake_enter(const char *function);
#define ENTER(function)                                                                            \
    do {                                                                                           \
        CUresult entered = fake_enter(#function);                                                  \
        if (entered)                                                                               \
            return entered;                                                                        \
    } while (0)
/* Returns the thread's current context, or NULL with *result. */
context *fake_current(CUresult *result);
#define CURRENT(c)                                                                                 \
    CUresult current_result;                                                                       \
    context *c = fake_current(&current_result);                                                    \
    if (!c)                                                                                        \
    return current_result

context *fake_context(int ordinal); /* NULL when there is no such device */
int fake_ordinal(int physical);     /* -1 when this process does not see it */
int fake_visible(void);
int fake_physical_count(void);
void fake_break(context *c, CUresult result);
uint64_t fake_number(const char *variable, uint64_t otherwise);
extern _Thread_local bool fake_in_host_function;

/* ---- machine.c: the state that processes share ----------------------------------------------- */

uint64_t fake_id(void); /* never the same twice on the machine */
uint64_t fake_start_of(pid_t pid);
bool fake_alive(pid_t pid, uint64_t start); /* false for a zombie, too */
/* Notes that this process holds an allocation. Returns false when the GPU's memory is full. */
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
    int physical;         /* the GPU whose memory it is; -1 means the host's */
    context *owner;       /* the context in which it was made */
    uint64_t id;          /* of the allocation */
    uint64_t serial;      /* of this range of addresses */
    uint64_t read, write; /* bit sets of the GPUs that may */
    size_t offset;        /* in its file */
    bool exported;        /* by a legacy handle */
    allocation *backing;  /* a mapping's */
    pid_t from;           /* an import's owner */
    uint64_t from_start;
    unsigned opens;
};

extern pthread_mutex_t fake_lock; /* ranges and allocations */

/* Must be called under the lock. Returns NULL when no memory lies there. */
range *fake_range_at(uintptr_t at);
range *fake_range_add(const range *r); /* NULL when out of memory */
void fake_range_remove(range *r);
range *fake_range_import(uint64_t id, const context *owner);
/* Returns whether the address belongs to GPUs, mapped or not. */
bool fake_is_device_space(uintptr_t at);
void *fake_map_fixed(uintptr_t at, size_t bytes, int protection, int fd, size_t offset);
/* Returns addresses with guards that nothing can access yet; 0 when none are left. */
uintptr_t fake_reserve(size_t bytes, size_t alignment);
void fake_unreserve(uintptr_t at, size_t bytes);

/* Returns an error unless this GPU may copy from, or to, these bytes. With `device`, they must be a
 * GPU's or registered. */
CUresult fake_may(context *c, uintptr_t at, size_t bytes, bool write, bool device);
/* Frees everything that was allocated in a context that ends. */
void fake_memory_end(context *c);
void fake_imports_check(void);
int fake_handle_types(const allocation *backing); /* the types that it may be exported as */

/* ---- stream.c: work in order ----------------------------------------------------------------- */

typedef struct work work;
typedef CUresult (*work_fn)(context *c, void *argument);

/* Appends work to a stream; `argument` is copied. A `stream` of NULL or 1 is the default one. */
CUresult fake_submit(context *c, CUstream stream, work_fn run, const void *argument, size_t size);
CUresult fake_drain(context *c);                         /* waits for all of a context's streams */
context *fake_stream_owner(context *c, CUstream stream); /* NULL when there is none */
CUresult fake_stream_wait(context *c, CUstream stream);
void fake_streams_end(context *c);

/* ---- kernels.c ------------------------------------------------------------------------------- */

/* One kernel, compiled as C: run(parameters) does one block, whose index and count are in
 * fake_block and fake_grid. */
typedef struct fake_kernel {
    const char *name;
    size_t bytes; /* of its one parameter */
    void (*run)(const void *parameter);
} fake_kernel;

extern const fake_kernel fake_kernels[];
extern const size_t fake_kernel_count;
/* Sets the block that the kernel's code finds as its own. */
void fake_kernel_place(unsigned int block, unsigned int blocks);
