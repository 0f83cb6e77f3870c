/* A fake NCCL for tests with the fake driver (tests/gpu/fake): communicators of two ranks, that do
 * not block, over a socket. Rank 0 is of the process that made the id.
 *
 *   FAKE_NCCL_FAIL=WHAT:N    "init:N", "register:N", "send:N": call N fails;
 *                            "hang:N": transfer N never ends;
 *                            "enter:N": the group that begins transfer N is never entered;
 *                            "flip:N": what transfer N received arrives with a bit changed
 *   FAKE_NCCL_INIT_MS=N      every communicator takes so long to be made
 *   FAKE_NCCL_LOG=FILE       a line for each group: communicator, operations, bytes of all
 *
 * As the real one, it refuses two ranks on one GPU, and calls while one is still being entered. A
 * group of more than a few operations is never entered: the real one hangs in large ones. */
#include "memory/cuda_abi.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    SUCCESS,
    CUDA_FAILED,
    SYSTEM,
    INTERNAL,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    REMOTE,
    IN_PROGRESS
};

typedef struct nccl_id {
    uint8_t bytes[128];
} nccl_id;

typedef struct nccl_config {
    size_t size;
    unsigned int magic, version;
    int blocking;
} nccl_config;

typedef struct transfer {
    struct transfer *next;
    struct nccl_comm *comm;
    uint8_t *at;
    size_t bytes;
    bool sends, hangs, lingers, flips;
    CUstream stream;
} transfer;

typedef struct nccl_comm {
    int rank, socket;
    nccl_id id;
    uint8_t uuid[16];
    CUcontext context;
    atomic_int state; /* what ncclCommGetAsyncError says */
    atomic_int aborts, running;
    transfer *first;     /* still to be entered */
    uint8_t *registered; /* NULL: nothing */
    size_t registered_bytes;
    pthread_t thread;
} nccl_comm;

static CUresult (*launch_host)(CUstream, CUhostFn, void *);
static CUresult (*memory_alloc)(CUdeviceptr *, size_t), (*memory_free)(CUdeviceptr);
static CUresult (*context_get)(CUcontext *), (*context_set)(CUcontext), (*device_get)(CUdevice *);
static CUresult (*device_uuid)(CUuuid *, CUdevice);

/* Of ids that were made here, and whose rank 0 has not come yet. */
enum { LISTENERS = 64 };
static struct {
    nccl_id id;
    int fd; /* 0: free */
} listeners[LISTENERS];
static pthread_mutex_t listeners_lock = PTHREAD_MUTEX_INITIALIZER;

static _Thread_local transfer *grouped, **grouped_end;
static _Thread_local int group_depth;
static atomic_uint calls[6];

int ncclGetVersion(int *version);
const char *ncclGetErrorString(int result);
int ncclGetUniqueId(nccl_id *id);
int ncclCommInitRankConfig(nccl_comm **out, int count, nccl_id id, int rank, nccl_config *config);
int ncclCommGetAsyncError(nccl_comm *c, int *state);
int ncclCommAbort(nccl_comm *c);
int ncclMemAlloc(void **at, size_t bytes);
int ncclMemFree(void *at);
int ncclCommRegister(nccl_comm *c, void *at, size_t bytes, void **handle);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclSend(const void *from, size_t count, int type, int peer, nccl_comm *c, CUstream stream);
int ncclRecv(void *to, size_t count, int type, int peer, nccl_comm *c, CUstream stream);

static bool is_wanted(int kind, const char *name)
{
    const char *spec = getenv("FAKE_NCCL_FAIL");
    size_t length = strlen(name);
    unsigned call = atomic_fetch_add(&calls[kind], 1) + 1;
    return spec && strncmp(spec, name, length) == 0 && spec[length] == ':' &&
           call == (unsigned)atoi(spec + length + 1);
}

static bool driver_found;

static void look_for_driver(void)
{
    const char *name = getenv("DRAY_CUDA_LIBRARY");
    void *driver = name ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!driver)
        return;
    *(void **)&launch_host = dlsym(driver, "cuLaunchHostFunc");
    *(void **)&context_get = dlsym(driver, "cuCtxGetCurrent");
    *(void **)&context_set = dlsym(driver, "cuCtxSetCurrent");
    *(void **)&device_get = dlsym(driver, "cuCtxGetDevice");
    *(void **)&device_uuid = dlsym(driver, "cuDeviceGetUuid_v2");
    *(void **)&memory_alloc = dlsym(driver, "cuMemAlloc_v2");
    *(void **)&memory_free = dlsym(driver, "cuMemFree_v2");
    driver_found = memory_alloc && memory_free && launch_host && context_get && context_set &&
                   device_get && device_uuid;
}

static bool find_driver(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, look_for_driver);
    return driver_found;
}

int ncclGetVersion(int *version)
{
    *version = 22809;
    return SUCCESS;
}

const char *ncclGetErrorString(int result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

/* ---- making a communicator ------------------------------------------------------------------- */

static socklen_t address_of(const nccl_id *id, struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "fake-nccl-");
    for (int i = 0; i < 16; i++)
        n += snprintf(out->sun_path + 1 + n, 3, "%02x", id->bytes[i]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

int ncclGetUniqueId(nccl_id *id)
{
    struct sockaddr_un address;
    memset(id, 0, sizeof *id);
    if (getrandom(id->bytes, 16, 0) != 16)
        return SYSTEM;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t length = address_of(id, &address);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, length) || listen(fd, 4)) {
        if (fd >= 0)
            close(fd);
        return SYSTEM;
    }
    pthread_mutex_lock(&listeners_lock);
    int i = 0;
    while (i < LISTENERS - 1 && listeners[i].fd)
        i++;
    if (listeners[i].fd) /* of a communicator that never was made */
        close(listeners[i].fd);
    listeners[i].id = *id;
    listeners[i].fd = fd;
    pthread_mutex_unlock(&listeners_lock);
    return SUCCESS;
}

static bool readable(nccl_comm *c, int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    while (!atomic_load(&c->aborts))
        if (poll(&p, 1, 20) > 0)
            return true;
    return false;
}

static int take_listener(const nccl_id *id)
{
    int fd = -1;
    pthread_mutex_lock(&listeners_lock);
    for (int i = 0; i < LISTENERS && fd < 0; i++)
        if (listeners[i].fd && memcmp(&listeners[i].id, id, sizeof *id) == 0) {
            fd = listeners[i].fd;
            listeners[i].fd = 0;
        }
    pthread_mutex_unlock(&listeners_lock);
    return fd;
}

static bool meet(nccl_comm *c)
{
    struct sockaddr_un address;
    socklen_t length = address_of(&c->id, &address);
    if (c->rank == 0) {
        int fd = take_listener(&c->id);
        if (fd < 0)
            return false;
        c->socket = readable(c, fd) ? accept4(fd, NULL, NULL, SOCK_CLOEXEC) : -1;
        close(fd);
        return c->socket >= 0;
    }
    c->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (c->socket >= 0 && !atomic_load(&c->aborts)) {
        if (connect(c->socket, (struct sockaddr *)&address, length) == 0)
            return true;
        usleep(5000);
    }
    return false;
}

static int make(nccl_comm *c)
{
    uint8_t theirs[16];
    const char *takes = getenv("FAKE_NCCL_INIT_MS");
    if (!meet(c))
        return SYSTEM;
    for (int left = takes ? atoi(takes) : 0; left > 0 && !atomic_load(&c->aborts); left -= 10)
        usleep(10000);
    if (send(c->socket, c->uuid, 16, MSG_NOSIGNAL) != 16 || !readable(c, c->socket) ||
        recv(c->socket, theirs, 16, MSG_WAITALL) != 16)
        return REMOTE;
    return memcmp(theirs, c->uuid, 16) ? SUCCESS : INVALID_USAGE; /* a GPU twice */
}

static void *run_make(void *user)
{
    nccl_comm *c = user;
    atomic_store(&c->state, make(c));
    return NULL;
}

static void join(nccl_comm *c)
{
    if (c->thread)
        pthread_join(c->thread, NULL);
    c->thread = 0;
}

int ncclCommInitRankConfig(nccl_comm **out, int count, nccl_id id, int rank, nccl_config *config)
{
    CUdevice device;
    if (!find_driver() || device_get(&device))
        return CUDA_FAILED;
    if (count != 2 || config->magic != 0xcafebeef || config->blocking != 0 || rank < 0 || rank > 1)
        return INVALID_ARGUMENT;
    if (is_wanted(0, "init"))
        return INTERNAL;
    nccl_comm *c = calloc(1, sizeof *c);
    if (!c)
        return SYSTEM;
    c->rank = rank;
    c->socket = -1;
    c->id = id;
    atomic_store(&c->state, IN_PROGRESS);
    context_get(&c->context);
    CUuuid uuid;
    if (device_uuid(&uuid, device)) {
        free(c);
        return CUDA_FAILED;
    }
    memcpy(c->uuid, uuid.bytes, 16);
    if (pthread_create(&c->thread, NULL, run_make, c)) {
        free(c);
        return SYSTEM;
    }
    *out = c;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(nccl_comm *c, int *state)
{
    *state = atomic_load(&c->state);
    return SUCCESS;
}

int ncclCommAbort(nccl_comm *c)
{
    atomic_store(&c->aborts, 1);
    join(c);
    while (atomic_load(&c->running))
        usleep(1000);
    if (c->socket >= 0)
        close(c->socket);
    free(c);
    return SUCCESS;
}

/* ---- registered memory ----------------------------------------------------------------------- */

int ncclMemAlloc(void **at, size_t bytes)
{
    CUdeviceptr memory = 0;
    if (!find_driver() || memory_alloc(&memory, bytes))
        return CUDA_FAILED;
    *at = (void *)(uintptr_t)memory;
    return SUCCESS;
}

int ncclMemFree(void *at)
{
    return memory_free((CUdeviceptr)(uintptr_t)at) ? CUDA_FAILED : SUCCESS;
}

int ncclCommRegister(nccl_comm *c, void *at, size_t bytes, void **handle)
{
    if (atomic_load(&c->state) || c->registered)
        return INVALID_USAGE;
    if (is_wanted(5, "register"))
        return INTERNAL;
    c->registered = at;
    c->registered_bytes = bytes;
    *handle = at;
    return SUCCESS;
}

/* ---- transfers ------------------------------------------------------------------------------- */

static bool step(nccl_comm *c, const transfer *t, size_t *done)
{
    struct pollfd p = {.fd = c->socket, .events = t->sends ? POLLOUT : POLLIN};
    if (poll(&p, 1, 20) <= 0)
        return true;
    ssize_t n = t->sends
                    ? send(c->socket, t->at + *done, t->bytes - *done, MSG_NOSIGNAL | MSG_DONTWAIT)
                    : recv(c->socket, t->at + *done, t->bytes - *done, MSG_DONTWAIT);
    if (n > 0)
        *done += (size_t)n;
    return n > 0 || (n < 0 && errno == EAGAIN);
}

/* In its turn in the stream. A peer that is gone may show, or not: here it does. */
static void run_transfer(void *user)
{
    transfer *t = user;
    nccl_comm *c = t->comm;
    size_t done = 0;
    while ((t->hangs || done < t->bytes) && !atomic_load(&c->aborts)) {
        if (t->hangs) {
            usleep(10000);
        } else if (!step(c, t, &done)) {
            atomic_store(&c->state, REMOTE);
            break;
        }
    }
    if (t->flips && !t->sends && done == t->bytes)
        t->at[t->bytes / 2] ^= 0x10;
    free(t);
    atomic_fetch_sub(&c->running, 1);
}

/* As the real one does it, beside its caller. */
static void *run_enter(void *user)
{
    nccl_comm *c = user;
    int state = context_set(c->context) ? CUDA_FAILED : SUCCESS;
    usleep(200);
    for (transfer *t = c->first, *next; t; t = next) {
        next = t->next;
        while (t->lingers && !atomic_load(&c->aborts))
            usleep(10000);
        atomic_fetch_add(&c->running, 1);
        if (launch_host(t->stream, run_transfer, t)) {
            atomic_fetch_sub(&c->running, 1);
            free(t);
            state = CUDA_FAILED;
        }
    }
    c->first = NULL;
    atomic_store(&c->state, state);
    return NULL;
}

int ncclGroupStart(void)
{
    if (group_depth++ == 0)
        grouped_end = &grouped;
    return SUCCESS;
}

enum { GROUP_MOST = 64 };

static void log_group(transfer *first)
{
    const char *path = getenv("FAKE_NCCL_LOG");
    unsigned operations = 0;
    size_t bytes = 0;
    for (const transfer *t = first; t; t = t->next) {
        operations++;
        bytes += t->bytes;
    }
    first->lingers |= operations > GROUP_MOST;
    FILE *log = path ? fopen(path, "ae") : NULL;
    if (!log)
        return;
    fprintf(log, "%p %u %zu\n", (void *)first->comm, operations, bytes);
    fclose(log);
}

int ncclGroupEnd(void)
{
    if (!group_depth)
        return INVALID_USAGE;
    if (--group_depth || !grouped)
        return SUCCESS;
    nccl_comm *c = grouped->comm;
    log_group(grouped);
    c->first = grouped;
    grouped = NULL;
    join(c);
    atomic_store(&c->state, IN_PROGRESS);
    if (pthread_create(&c->thread, NULL, run_enter, c))
        return SYSTEM;
    return IN_PROGRESS;
}

static int put(void *at, size_t bytes, int type, int peer, nccl_comm *c, CUstream stream,
               bool sends)
{
    int state = atomic_load(&c->state);
    if (type > 1 || peer != 1 - c->rank || !group_depth)
        return INVALID_ARGUMENT;
    if (state)
        return state == IN_PROGRESS ? INVALID_USAGE : state;
    if (c->registered && ((uint8_t *)at < c->registered ||
                          (uint8_t *)at + bytes > c->registered + c->registered_bytes))
        return INVALID_USAGE; /* the real one's behaviour is undefined then */
    if (is_wanted(1, "send"))
        return INTERNAL;
    transfer *t = calloc(1, sizeof *t);
    if (!t)
        return SYSTEM;
    *t = (transfer){.comm = c,
                    .at = at,
                    .bytes = bytes,
                    .sends = sends,
                    .hangs = is_wanted(2, "hang"),
                    .lingers = is_wanted(3, "enter"),
                    .flips = is_wanted(4, "flip"),
                    .stream = stream};
    *grouped_end = t;
    grouped_end = &t->next;
    return SUCCESS;
}

int ncclSend(const void *from, size_t count, int type, int peer, nccl_comm *c, CUstream stream)
{
    return put((void *)(uintptr_t)from, count, type, peer, c, stream, true);
}

int ncclRecv(void *to, size_t count, int type, int peer, nccl_comm *c, CUstream stream)
{
    return put(to, count, type, peer, c, stream, false);
}
