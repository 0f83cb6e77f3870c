/* The queue of reads and writes of files, its two implementations, and the code that both share:
 * the choice of direct reads, and the handling of short answers. */
#include "mover/disk.h"

#include "base/error.h"
#include "base/thread.h"
#include "memory/region.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { THREADS = 8 };

typedef struct io_list {
    dray__io *first, **last;
} io_list;

struct dray__disk {
    pid_t pid;
    bool uring;
    int event;
    size_t under_way;
    io_list waiting; /* the operations that have not begun; the threads take them under the lock */

    /* threads */
    dray__thread threads[THREADS];
    pthread_mutex_t lock;
    pthread_cond_t more;
    atomic_bool ends; /* closing: waits for a store's server are cut short */
    io_list finished;

    /* io_uring: all of it runs in the caller's thread */
    struct io_uring ring;
    unsigned in_ring, taken; /* taken: those of them that the kernel has accepted */
    io_list handed;          /* the others, in the order of the ring */
    bool refused;            /* the kernel accepts none any more */
};

static dray__disk_fault_fn ask;
static void *ask_user;
static dray__disk_way preferred = DRAY__DISK_ANY;

void dray__disk_faults(dray__disk_fault_fn fn, void *user)
{
    ask = fn;
    ask_user = user;
}

void dray__disk_prefer(dray__disk_way way)
{
    preferred = way;
}

static void list_init(io_list *l)
{
    l->first = NULL;
    l->last = &l->first;
}

static void list_add(io_list *l, dray__io *io)
{
    io->next = NULL;
    *l->last = io;
    l->last = &io->next;
}

static dray__io *list_take(io_list *l)
{
    dray__io *io = l->first;
    if (io && !(l->first = io->next))
        l->last = &l->first;
    return io;
}

/* ---- files ----------------------------------------------------------------------------------- */

void dray__disk_file_open(dray__disk_file *file, int fd, bool writable, const char *name)
{
    char path[64];
    *file = (dray__disk_file){.fd = fd, .name = name};
    /* Opens the same file again, even when another file has its name by now. */
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    file->direct = open(path, (writable ? O_RDWR : O_RDONLY) | O_DIRECT | O_CLOEXEC);
}

void dray__disk_file_object(dray__disk_file *file, const dray_region *region)
{
    *file = (dray__disk_file){
        .fd = -1, .direct = -1, .name = dray_region_name(region), .object = region};
}

void dray__disk_file_close(dray__disk_file *file)
{
    if (file->direct >= 0)
        close(file->direct);
    file->direct = -1;
}

/* ---- one piece of work ----------------------------------------------------------------------- */

static bool aligned(const dray__io *io)
{
    return ((io->offset + io->done) | (io->bytes - io->done) | ((uintptr_t)io->data + io->done)) %
               DRAY__IO_ALIGN ==
           0;
}

static int descriptor(dray__io *io)
{
    io->direct = io->file->direct >= 0 && aligned(io);
    return io->direct ? io->file->direct : io->file->fd;
}

/* Handles a result of `n` bytes or -errno. Returns true when the operation is complete. */
static bool account(dray__io *io, int64_t n)
{
    if (n == -EINTR || n == -EAGAIN)
        return false;
    if (n == -EINVAL && io->direct) { /* This alignment, or this file system, does not allow it. */
        io->direct = false;
        return false;
    }
    if (n < 0 || (n == 0 && io->write))
        io->code = n < 0 ? (int)-n : ENOSPC;
    else
        io->done += (size_t)n;
    return io->code || n == 0 || io->done >= io->bytes;
}

/* Returns how many bytes to read or write at once, or 0 when a test makes the operation fail. */
static size_t portion(dray__io *io)
{
    size_t left = io->bytes - io->done;
    int fault = ask ? ask(ask_user, io) : 0;
    if (fault > 0)
        io->code = fault;
    return fault > 0 ? 0 : (fault < 0 && left > 1 ? left / 2 : left);
}

/* Reads bytes up to the object's end, as of a file. */
static void work_on_object(dray__io *io, const atomic_bool *ends)
{
    uint64_t bytes = dray_region_bytes(io->file->object);
    size_t left = io->offset >= bytes ? 0 : (size_t)(bytes - io->offset);
    left = left < io->bytes ? left : io->bytes;
    io->object_code =
        dray__region_object_read(io->file->object, io->offset, io->data, left, ends, io->why);
    io->done = io->object_code ? 0 : left;
}

static void work(dray__io *io, const atomic_bool *ends)
{
    bool refused = false;
    if (io->file->object) {
        work_on_object(io, ends);
        return;
    }
    for (;;) {
        size_t bytes = portion(io);
        if (!bytes)
            return;
        int fd = descriptor(io);
        if (refused) {
            io->direct = false;
            fd = io->file->fd;
        }
        uint8_t *at = (uint8_t *)io->data + io->done;
        off_t offset = (off_t)(io->offset + io->done);
        ssize_t n = io->write ? pwrite(fd, at, bytes, offset) : pread(fd, at, bytes, offset);
        bool direct = io->direct;
        if (account(io, n < 0 ? -errno : n))
            return;
        refused |= direct && !io->direct;
    }
}

/* ---- threads --------------------------------------------------------------------------------- */

static void tell(const dray__disk *disk)
{
    uint64_t one = 1;
    ssize_t n = write(disk->event, &one, sizeof one);
    (void)n; /* The event is full, so it is readable already. */
}

static void *run(void *user)
{
    dray__disk *disk = user;
    pthread_mutex_lock(&disk->lock);
    for (;;) {
        dray__io *io = list_take(&disk->waiting);
        if (!io && atomic_load(&disk->ends))
            break;
        if (!io) {
            pthread_cond_wait(&disk->more, &disk->lock);
            continue;
        }
        pthread_mutex_unlock(&disk->lock);
        work(io, &disk->ends);
        pthread_mutex_lock(&disk->lock);
        bool first = !disk->finished.first;
        list_add(&disk->finished, io);
        if (first)
            tell(disk);
    }
    pthread_mutex_unlock(&disk->lock);
    return NULL;
}

static int start_threads(dray__disk *disk, dray_error *error)
{
    int rc = DRAY_OK;
    for (unsigned i = 0; i < THREADS && !rc; i++)
        rc = dray__thread_start(&disk->threads[i], run, disk, "files", error);
    return disk->threads[0].begun ? DRAY_OK : rc; /* one is enough */
}

/* ---- io_uring -------------------------------------------------------------------------------- */

static int start_ring(dray__disk *disk, dray_error *error)
{
    int code = -io_uring_queue_init(DRAY__IO_DEPTH, &disk->ring, 0);
    if (code)
        return dray__fail(error, DRAY_EUNSUPPORTED, "io_uring: errno %d", code);
    disk->uring = true;
    struct io_uring_probe *probe = io_uring_get_probe_ring(&disk->ring);
    bool has = probe && io_uring_opcode_supported(probe, IORING_OP_READ) &&
               io_uring_opcode_supported(probe, IORING_OP_WRITE);
    io_uring_free_probe(probe);
    if (has && io_uring_register_eventfd(&disk->ring, disk->event) == 0)
        return DRAY_OK;
    io_uring_queue_exit(&disk->ring);
    disk->uring = false;
    return dray__fail(error, DRAY_EUNSUPPORTED, "io_uring: without reading, writing or events");
}

static void work_at_once(dray__disk *disk, dray__io *io)
{
    work(io, &disk->ends);
    list_add(&disk->finished, io);
    tell(disk);
}

/* Submits the entries of the ring. A kernel that is short of memory accepts less than that, or
 * nothing. The rest is submitted again when an accepted operation is complete. Without one no event
 * would come: then plain system calls do the rest, and the ring, which still has their entries, is
 * not used any more. */
static void submit(dray__disk *disk)
{
    if (!disk->handed.first)
        return;
    for (int n = io_uring_submit(&disk->ring); n > 0 && list_take(&disk->handed); n--)
        disk->taken++;
    if (!disk->handed.first || disk->taken)
        return;
    disk->refused = true;
    for (dray__io *io; (io = list_take(&disk->handed)); disk->in_ring--)
        work_at_once(disk, io);
}

/* Gives waiting operations to the ring. Plain system calls do those that a test makes fail. */
static void feed(dray__disk *disk)
{
    while (disk->waiting.first && disk->in_ring < DRAY__IO_DEPTH) {
        dray__io *io = list_take(&disk->waiting);
        bool plain = ask || disk->refused;
        struct io_uring_sqe *sqe = plain ? NULL : io_uring_get_sqe(&disk->ring);
        if (!sqe) {
            work_at_once(disk, io);
            continue;
        }
        int fd = descriptor(io);
        size_t left = io->bytes - io->done;
        unsigned bytes = left < 1u << 30 ? (unsigned)left : 1u << 30;
        uint8_t *at = (uint8_t *)io->data + io->done;
        if (io->write)
            io_uring_prep_write(sqe, fd, at, bytes, io->offset + io->done);
        else
            io_uring_prep_read(sqe, fd, at, bytes, io->offset + io->done);
        io_uring_sqe_set_data(sqe, io);
        list_add(&disk->handed, io);
        disk->in_ring++;
    }
    submit(disk);
}

/* Takes completions from the ring. Operations that were refused or are incomplete go on with plain
 * system calls, which is rare and happens mostly at the end of a file. */
static void drain(dray__disk *disk)
{
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&disk->ring, &cqe) == 0) {
        dray__io *io = io_uring_cqe_get_data(cqe);
        int answer = cqe->res;
        io_uring_cqe_seen(&disk->ring, cqe);
        disk->in_ring--;
        disk->taken--;
        if (!account(io, answer) && (io->write || io->done < io->least || answer < 0))
            work(io, &disk->ends);
        list_add(&disk->finished, io);
    }
    feed(disk);
}

/* ---- the queue ------------------------------------------------------------------------------- */

int dray__disk_open(dray__disk_way way, dray__disk **out, dray_error *error)
{
    dray__disk *disk = calloc(1, sizeof *disk);
    if (!disk)
        return dray__nomem(error);
    if (way == DRAY__DISK_ANY)
        way = preferred;
    disk->pid = getpid();
    list_init(&disk->waiting);
    list_init(&disk->finished);
    list_init(&disk->handed);
    pthread_mutex_init(&disk->lock, NULL);
    pthread_cond_init(&disk->more, NULL);
    disk->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = disk->event < 0 ? dray__fail_errno(error, errno, "eventfd") : DRAY_OK;
    if (!rc && way != DRAY__DISK_THREADS)
        rc = start_ring(disk, error);
    if (way == DRAY__DISK_THREADS || (way == DRAY__DISK_ANY && rc == DRAY_EUNSUPPORTED))
        rc = disk->event < 0 ? rc : start_threads(disk, error);
    if (rc)
        dray__disk_close(disk);
    else
        *out = disk;
    return rc;
}

void dray__disk_submit(dray__disk *disk, dray__io *io)
{
    io->done = 0;
    io->code = io->object_code = 0;
    disk->under_way++;
    if (disk->uring) {
        list_add(&disk->waiting, io);
        feed(disk);
        return;
    }
    pthread_mutex_lock(&disk->lock);
    list_add(&disk->waiting, io);
    pthread_cond_signal(&disk->more);
    pthread_mutex_unlock(&disk->lock);
}

dray__io *dray__disk_take(dray__disk *disk)
{
    uint64_t count;
    if (disk->uring) {
        if (!disk->finished.first)
            drain(disk);
    } else {
        pthread_mutex_lock(&disk->lock);
    }
    dray__io *io = list_take(&disk->finished);
    if (!io) { /* An operation that finishes from here on sets it again. */
        ssize_t n = read(disk->event, &count, sizeof count);
        (void)n;
        if (disk->uring) {
            drain(disk);
            io = list_take(&disk->finished);
        }
    }
    if (!disk->uring)
        pthread_mutex_unlock(&disk->lock);
    disk->under_way -= io != NULL;
    return io;
}

size_t dray__disk_under_way(const dray__disk *disk)
{
    return disk->under_way;
}

int dray__disk_fd(const dray__disk *disk)
{
    return disk->event;
}

int dray__io_result(const dray__io *io, dray_error *error)
{
    const char *what = io->write ? "writing" : "reading";
    if (io->object_code) {
        if (error && io->why)
            *error = *io->why;
        return io->object_code;
    }
    if (io->code)
        return dray__fail_errno(error, io->code, "%s %zu bytes at %llu of %.300s", what,
                                io->bytes - io->done, (unsigned long long)(io->offset + io->done),
                                io->file->name);
    if (!io->write && io->done < io->least)
        return dray__fail(error, DRAY_EFORMAT, "%.300s ends at byte %llu, %zu more expected",
                          io->file->name, (unsigned long long)(io->offset + io->done),
                          io->least - io->done);
    return DRAY_OK;
}

/* Waits for all that is under way. A forked child has no part in it: it has none of the threads,
 * and would take results from the ring, which it shares with its parent. */
static void end_work(dray__disk *disk)
{
    atomic_store(&disk->ends, true);
    while (disk->under_way && (disk->uring || disk->threads[0].begun)) {
        struct pollfd p = {.fd = disk->event, .events = POLLIN};
        if (!dray__disk_take(disk))
            poll(&p, 1, 1000);
    }
    pthread_mutex_lock(&disk->lock);
    pthread_cond_broadcast(&disk->more);
    pthread_mutex_unlock(&disk->lock);
    for (unsigned i = 0; i < THREADS; i++)
        dray__thread_join(&disk->threads[i]);
    pthread_mutex_destroy(&disk->lock);
    pthread_cond_destroy(&disk->more);
}

void dray__disk_close(dray__disk *disk)
{
    if (!disk)
        return;
    if (disk->pid == getpid())
        end_work(disk);
    if (disk->uring)
        io_uring_queue_exit(&disk->ring);
    if (disk->event >= 0)
        close(disk->event);
    free(disk);
}
