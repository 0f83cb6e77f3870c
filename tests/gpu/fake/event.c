/* The fake driver's events, those that other processes open too. */
#include "event.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CELLS = 4096, MAGIC = 0x45564E54 };

typedef struct event {
    struct event *next;
    context *owner;
    unsigned int flags;
    event_cell *cell;
    void *imported; /* the cells of another process */
    pid_t from;
    uint64_t from_start;
    struct timespec when;
    atomic_uint users;
} event;

typedef struct event_handle {
    uint32_t magic;
    int32_t pid;
    uint64_t start;
    int32_t fd;
    uint32_t index, serial, physical;
    uint8_t unused[32];
} event_handle;

_Static_assert(sizeof(event_handle) == sizeof(CUipcEventHandle), "64 bytes");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static event *events;
static event_cell *cells; /* those that other processes may map */
static int cells_fd = -1;
static uint32_t serials;

/* ---- cells ----------------------------------------------------------------------------------- */

bool fake_cell_reached(const event_cell *cell, uint32_t record)
{
    return (int32_t)(__atomic_load_n(&cell->completed, __ATOMIC_SEQ_CST) - record) >= 0;
}

void fake_cell_complete(event_cell *cell, uint32_t record)
{
    uint32_t now = __atomic_load_n(&cell->completed, __ATOMIC_SEQ_CST);
    while ((int32_t)(now - record) < 0 &&
           !__atomic_compare_exchange_n(&cell->completed, &now, record, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
        ;
    syscall(SYS_futex, &cell->completed, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void fake_cell_wait(event_cell *cell, uint32_t record, pid_t owner, uint64_t start)
{
    const struct timespec while_ = {.tv_nsec = 20 * 1000 * 1000};
    while (!fake_cell_reached(cell, record)) {
        uint32_t seen = __atomic_load_n(&cell->completed, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - record) >= 0)
            return;
        if (owner && !fake_alive(owner, start))
            return;
        syscall(SYS_futex, &cell->completed, FUTEX_WAIT, seen, &while_, NULL, 0);
    }
}

static bool cells_begin(void)
{
    if (cells)
        return true;
    cells_fd = memfd_create("fake-cuda-events", MFD_CLOEXEC);
    size_t bytes = CELLS * sizeof *cells;
    void *at = cells_fd >= 0 && ftruncate(cells_fd, (off_t)bytes) == 0
                   ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, cells_fd, 0)
                   : MAP_FAILED;
    if (at == MAP_FAILED)
        return false;
    cells = at;
    return true;
}

static event_cell *shared_cell(void)
{
    for (int i = 0; cells_begin() && i < CELLS; i++)
        if (!cells[i].taken) {
            cells[i] = (event_cell){.taken = 1, .serial = ++serials};
            return &cells[i];
        }
    return NULL;
}

static void put_down(event *e)
{
    if (atomic_fetch_sub(&e->users, 1) != 1)
        return;
    if (e->imported) {
        munmap(e->imported, CELLS * sizeof *cells);
    } else if (e->flags & CU_EVENT_INTERPROCESS) {
        pthread_mutex_lock(&lock);
        e->cell->taken = 0;
        pthread_mutex_unlock(&lock);
    } else {
        free(e->cell);
    }
    free(e);
}

/* Another use of an event; NULL: it is none. */
static event *pick_up(CUevent given)
{
    pthread_mutex_lock(&lock);
    event *e = events;
    while (e && (CUevent)e != given)
        e = e->next;
    if (e)
        atomic_fetch_add(&e->users, 1);
    pthread_mutex_unlock(&lock);
    return e;
}

/* ---- the driver's functions ------------------------------------------------------------------ */

CUresult cuEventCreate(CUevent *out, unsigned int flags)
{
    ENTER(cuEventCreate);
    CURRENT(c);
    bool shared = flags & CU_EVENT_INTERPROCESS;
    if (flags & ~7u || (shared && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    event *e = calloc(1, sizeof *e);
    if (!e)
        return CUDA_ERROR_OUT_OF_MEMORY;
    e->owner = c;
    e->flags = flags;
    atomic_store(&e->users, 1);
    pthread_mutex_lock(&lock);
    e->cell = shared ? shared_cell() : calloc(1, sizeof *e->cell);
    if (e->cell) {
        e->next = events;
        events = e;
    }
    pthread_mutex_unlock(&lock);
    if (!e->cell) {
        free(e);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (CUevent)e;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent given)
{
    ENTER(cuEventDestroy);
    pthread_mutex_lock(&lock);
    event **link = &events;
    while (*link && (CUevent)*link != given)
        link = &(*link)->next;
    event *e = *link;
    if (e)
        *link = e->next;
    pthread_mutex_unlock(&lock);
    if (!e)
        return CUDA_ERROR_INVALID_HANDLE;
    put_down(e);
    return CUDA_SUCCESS;
}

typedef struct mark {
    event *e;
    uint32_t record;
} mark;

static CUresult do_record(context *c, void *argument)
{
    const mark *m = argument;
    (void)c;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&lock); /* two streams may record an event at once */
    m->e->when = now;
    pthread_mutex_unlock(&lock);
    fake_cell_complete(m->e->cell, m->record);
    put_down(m->e);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent given, CUstream stream)
{
    ENTER(cuEventRecord);
    CURRENT(c);
    event *e = pick_up(given);
    if (!e)
        return CUDA_ERROR_INVALID_HANDLE;
    mark m = {e, __atomic_add_fetch(&e->cell->recorded, 1, __ATOMIC_SEQ_CST)};
    CUresult rc = fake_stream_owner(c, stream) != e->owner
                      ? CUDA_ERROR_INVALID_HANDLE
                      : fake_submit(c, stream, do_record, &m, sizeof m);
    if (rc) {
        fake_cell_complete(e->cell, m.record);
        put_down(e);
    }
    return rc;
}

static CUresult do_wait(context *c, void *argument)
{
    const mark *m = argument;
    (void)c;
    fake_cell_wait(m->e->cell, m->record, m->e->from, m->e->from_start);
    put_down(m->e);
    return CUDA_SUCCESS;
}

/* For what was recorded until now: an event that never was holds nobody up. */
CUresult cuStreamWaitEvent(CUstream stream, CUevent given, unsigned int flags)
{
    ENTER(cuStreamWaitEvent);
    CURRENT(c);
    event *e = flags ? NULL : pick_up(given);
    if (!e)
        return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    mark m = {e, __atomic_load_n(&e->cell->recorded, __ATOMIC_SEQ_CST)};
    CUresult rc = fake_submit(c, stream, do_wait, &m, sizeof m);
    if (rc)
        put_down(e);
    return rc;
}

CUresult cuEventQuery(CUevent given)
{
    ENTER(cuEventQuery);
    CURRENT(c);
    (void)c;
    event *e = pick_up(given);
    if (!e)
        return CUDA_ERROR_INVALID_HANDLE;
    bool done = fake_cell_reached(e->cell, __atomic_load_n(&e->cell->recorded, __ATOMIC_SEQ_CST));
    put_down(e);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to)
{
    ENTER(cuEventElapsedTime);
    event *a = pick_up(from), *b = pick_up(to);
    CUresult rc = CUDA_SUCCESS;
    if (!a || !b || ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING) || !a->cell->recorded ||
        !b->cell->recorded)
        rc = CUDA_ERROR_INVALID_HANDLE;
    else if (!fake_cell_reached(a->cell, a->cell->recorded) ||
             !fake_cell_reached(b->cell, b->cell->recorded))
        rc = CUDA_ERROR_NOT_READY;
    else {
        pthread_mutex_lock(&lock);
        *milliseconds = (float)(b->when.tv_sec - a->when.tv_sec) * 1e3f +
                        (float)(b->when.tv_nsec - a->when.tv_nsec) * 1e-6f;
        pthread_mutex_unlock(&lock);
    }
    if (a)
        put_down(a);
    if (b)
        put_down(b);
    return rc;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent given)
{
    ENTER(cuIpcGetEventHandle);
    event *e = pick_up(given);
    bool right = e && (e->flags & CU_EVENT_INTERPROCESS) && !e->imported;
    if (right) {
        const event_handle h = {.magic = MAGIC,
                                .pid = getpid(),
                                .start = fake_start_of(getpid()),
                                .fd = cells_fd,
                                .index = (uint32_t)(e->cell - cells),
                                .serial = e->cell->serial,
                                .physical = (uint32_t)e->owner->physical};
        memcpy(handle, &h, sizeof h);
    }
    if (e)
        put_down(e);
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle)
{
    ENTER(cuIpcOpenEventHandle);
    CURRENT(c);
    event_handle h;
    char path[64];
    memcpy(&h, &handle, sizeof h);
    if (h.magic != MAGIC || h.index >= CELLS)
        return CUDA_ERROR_INVALID_VALUE;
    if (h.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!fake_alive(h.pid, h.start))
        return CUDA_ERROR_INVALID_HANDLE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)h.pid, (int)h.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *at = fd < 0
                   ? MAP_FAILED
                   : mmap(NULL, CELLS * sizeof *cells, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    event *e = at == MAP_FAILED ? NULL : calloc(1, sizeof *e);
    if (!e)
        return CUDA_ERROR_OUT_OF_MEMORY;
    e->owner = c;
    e->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
    e->imported = at;
    e->cell = (event_cell *)at + h.index;
    e->from = h.pid;
    e->from_start = h.start;
    atomic_store(&e->users, 1);
    if (e->cell->serial != h.serial || !e->cell->taken) {
        put_down(e);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    pthread_mutex_lock(&lock);
    e->next = events;
    events = e;
    pthread_mutex_unlock(&lock);
    *out = (CUevent)e;
    return CUDA_SUCCESS;
}
