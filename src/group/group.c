/* Makes, joins and leaves groups, and waits: by spinning, sleeping, checking peers, and
 * aborting. */
#include "base/clock.h"
#include "base/error.h"
#include "group/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x70756f7267796172) /* "raygroup" */
#define VERSION 1
#define DEFAULT_SCRATCH (UINT64_C(1) << 20)
#define DEFAULT_TIMEOUT (60 * DRAY__SECOND)
/* How often a sleeper checks its peers. A death is found within this time and a little more. */
#define WATCH_NS (40 * DRAY__MILLISECOND)
#define SPIN_MAX 2000u
#define SPIN_MIN 32u

static const char *const operation_names[] = {"?",          "barrier",    "broadcast",
                                              "all_gather", "all_reduce", "reduce_scatter"};

static const char *operation_name(uint64_t operation)
{
    size_t count = sizeof operation_names / sizeof *operation_names;
    return operation_names[operation < count ? operation : 0];
}

static uint64_t header_bytes(uint32_t world)
{
    uint64_t bytes = sizeof(dray__group_header) + world * sizeof(dray__group_slot);
    return (bytes + 4095) & ~UINT64_C(4095);
}

int dray__group_create(uint32_t world, uint64_t scratch_bytes, int *fd, dray_error *error)
{
    if (world < 1 || world > DRAY__GROUP_MAX_WORLD)
        return dray__fail(error, DRAY_EINVALID, "group: expected a world of 1..%d, found %" PRIu32,
                          DRAY__GROUP_MAX_WORLD, world);
    if (scratch_bytes == 0)
        scratch_bytes = DEFAULT_SCRATCH;
    if (scratch_bytes > UINT64_C(1) << 40)
        return dray__fail(error, DRAY_EINVALID, "group: scratch of %" PRIu64 " bytes is too much",
                          scratch_bytes);
    uint64_t half = (scratch_bytes + 8191) / 8192 * 4096;
    uint64_t total = header_bytes(world) + 2 * half * world;
    int file = memfd_create("dray-group", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0)
        return dray__fail_errno(error, errno, "group: memfd_create");
    dray__group_header *header = MAP_FAILED;
    if (ftruncate(file, (off_t)total) == 0 &&
        fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        header = mmap(NULL, header_bytes(world), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (header == MAP_FAILED) {
        int errnum = errno;
        close(file);
        return dray__fail_errno(error, errnum, "group: shared memory of %" PRIu64 " bytes", total);
    }
    *header = (dray__group_header){
        .magic = MAGIC, .version = VERSION, .world = world, .half_bytes = half};
    header->total_bytes = total;
    munmap(header, header_bytes(world));
    *fd = file;
    return DRAY_OK;
}

/* Returns the start time of a process in clock ticks (proc(5), field 22 of stat). With the pid
 * it identifies one process for good. Returns 0 when there is no such process. */
static uint64_t process_start(pid_t pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    char *at = strrchr(text, ')'); /* The name before it may contain any character. */
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

static int map_shared(int fd, uint32_t world, dray__group_header **out, dray_error *error)
{
    struct stat status;
    if (fstat(fd, &status) != 0)
        return dray__fail_errno(error, errno, "group: descriptor %d", fd);
    uint64_t bytes = status.st_size < 0 ? 0 : (uint64_t)status.st_size;
    int seals = fcntl(fd, F_GET_SEALS);
    if (bytes < header_bytes(1) || seals < 0 || !(seals & F_SEAL_SHRINK))
        return dray__fail(error, DRAY_EINVALID, "group: descriptor %d is not a group", fd);
    dray__group_header *header = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (header == MAP_FAILED)
        return dray__fail_errno(error, errno, "group: mapping %" PRIu64 " bytes", bytes);
    int code = DRAY_OK;
    if (header->magic != MAGIC)
        code = dray__fail(error, DRAY_EINVALID, "group: descriptor %d is not a group", fd);
    else if (header->version != VERSION)
        code = dray__fail(error, DRAY_EVERSION, "group: expected version %d, found %" PRIu32,
                          VERSION, header->version);
    else if (header->world != world)
        code = dray__fail(error, DRAY_EINVALID,
                          "group: expected a world of %" PRIu32 ", found %" PRIu32, world,
                          header->world);
    else if (header->total_bytes != bytes || world > DRAY__GROUP_MAX_WORLD ||
             header->half_bytes > bytes ||
             header_bytes(world) + 2 * header->half_bytes * world != bytes)
        code = dray__fail(error, DRAY_EINVALID, "group: descriptor %d has a damaged header", fd);
    if (code != DRAY_OK)
        munmap(header, bytes);
    else
        *out = header;
    return code;
}

/* Returns how long to spin. Ranks that share one core do not spin, as it would only cost time. */
static uint32_t useful_spin(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) < 2)
        return 0;
    return SPIN_MAX;
}

static int aborted(const dray__group *group, dray_error *error);

int dray__group_open(int fd, uint32_t rank, uint32_t world, int64_t timeout_ns, dray__group **out,
                     dray_error *error)
{
    if (rank >= world)
        return dray__fail(error, DRAY_EINVALID,
                          "group: rank %" PRIu32 " is outside the world of %" PRIu32, rank, world);
    if (timeout_ns < 0)
        return dray__fail(error, DRAY_EINVALID, "group: negative timeout");
    dray__group *group = calloc(1, sizeof *group);
    if (!group)
        return dray__nomem(error);
    int code = map_shared(fd, world, &group->shared, error);
    if (code != DRAY_OK) {
        free(group);
        return code;
    }
    group->scratch = (unsigned char *)group->shared + header_bytes(world);
    group->rank = rank;
    group->world = world;
    group->timeout_ns = timeout_ns ? timeout_ns : DEFAULT_TIMEOUT;
    group->spin_max = group->spin = useful_spin();
    for (uint32_t i = 0; i < DRAY__GROUP_MAX_WORLD; i++)
        group->pidfd[i] = -1;
    dray__group_slot *slot = &group->shared->slots[rank];
    uint32_t nobody = 0;
    code = aborted(group, error);
    if (code == DRAY_OK && !atomic_compare_exchange_strong(&slot->pid, &nobody, (uint32_t)getpid()))
        code = dray__fail(error, DRAY_EEXIST,
                          "group: rank %" PRIu32 " was taken by process %" PRIu32, rank, nobody);
    if (code != DRAY_OK) {
        munmap(group->shared, group->shared->total_bytes);
        free(group);
        return code;
    }
    atomic_store(&slot->start_time, process_start(getpid()));
    *out = group;
    return DRAY_OK;
}

static void wake_all(dray__group *group)
{
    atomic_fetch_add(&group->shared->wake, 1);
    syscall(SYS_futex, &group->shared->wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void dray__group_close(dray__group *group)
{
    if (!group)
        return;
    atomic_store(&group->shared->slots[group->rank].left, 1);
    wake_all(group);
    for (uint32_t i = 0; i < group->world; i++)
        if (group->pidfd[i] >= 0)
            close(group->pidfd[i]);
    munmap(group->shared, group->shared->total_bytes);
    free(group);
}

uint32_t dray__group_rank(const dray__group *group)
{
    return group->rank;
}

uint32_t dray__group_world(const dray__group *group)
{
    return group->world;
}

/* ---- aborting -------------------------------------------------------------------------------- */

/* Only the first abort counts. `rank` is the dead rank, or the rank that has the reason in its
 * text. */
static void abort_group(dray__group *group, int code, uint32_t rank)
{
    uint64_t none = 0;
    atomic_compare_exchange_strong(&group->shared->aborted, &none, (uint64_t)-code << 32 | rank);
    wake_all(group);
}

static void abort_with_text(dray__group *group, int code, const char *text)
{
    if (atomic_load(&group->shared->aborted) == 0) {
        char *own = group->shared->slots[group->rank].text;
        snprintf(own, DRAY__GROUP_TEXT, "%s", text);
    }
    abort_group(group, code, group->rank);
}

void dray__group_abort(dray__group *group, const char *why)
{
    abort_with_text(group, DRAY_ECANCELED, why);
}

/* Returns the error of a group that was aborted, or DRAY_OK. */
static int aborted(const dray__group *group, dray_error *error)
{
    uint64_t word = atomic_load(&group->shared->aborted);
    if (word == 0)
        return DRAY_OK;
    int code = -(int)(word >> 32);
    uint32_t rank = (uint32_t)word;
    if (rank >= group->world)
        return dray__fail(error, DRAY_EPROTO, "group: damaged abort word");
    const dray__group_slot *slot = &group->shared->slots[rank];
    if (code != DRAY_EDEAD)
        return dray__fail(error, code, "group aborted by rank %" PRIu32 ": %.*s", rank,
                          DRAY__GROUP_TEXT - 1, slot->text);
    uint32_t pid = atomic_load(&slot->pid);
    return dray__fail(error, code, "rank %" PRIu32 " of the group (process %" PRIu32 ") %s", rank,
                      pid, atomic_load(&slot->left) ? "left" : "died");
}

/* ---- waiting --------------------------------------------------------------------------------- */

unsigned char *dray__group_half(dray__group *group, uint32_t rank, uint64_t round)
{
    return group->scratch + (2 * (uint64_t)rank + (round & 1)) * group->shared->half_bytes;
}

/* Returns the first rank that has not entered `round`, or world when all have. */
static uint32_t missing(const dray__group *group, uint64_t round)
{
    uint32_t rank = 0;
    while (rank < group->world && atomic_load(&group->shared->slots[rank].arrived) >= round)
        rank++;
    return rank;
}

static bool peer_is_dead(dray__group *group, uint32_t rank)
{
    const dray__group_slot *slot = &group->shared->slots[rank];
    pid_t pid = (pid_t)atomic_load(&slot->pid);
    bool unknown = false;            /* whether it is the process that joined */
    if (pid == 0 || pid == getpid()) /* It has not joined yet, or it is a thread of this process. */
        return false;
    if (group->pidfd[rank] < 0) {
        int fd = (int)syscall(SYS_pidfd_open, pid, 0);
        if (fd < 0)
            return errno == ESRCH;
        group->pidfd[rank] = fd;
        uint64_t said = atomic_load(&slot->start_time), found = process_start(pid);
        if (said != 0 && found != 0 && found != said) /* Another process has the number now. */
            return true;
        unknown = said != 0 && found == 0;
    }
    struct pollfd poller = {.fd = group->pidfd[rank], .events = POLLIN};
    bool dead = poll(&poller, 1, 0) == 1;
    if (unknown && !dead) { /* It lives, or /proc could not be read: looks again the next time. */
        close(group->pidfd[rank]);
        group->pidfd[rank] = -1;
    }
    return dead;
}

/* Aborts the group if a rank that we wait for cannot come any more. */
static void watch_peers(dray__group *group, uint64_t round)
{
    for (uint32_t rank = 0; rank < group->world; rank++) {
        dray__group_slot *slot = &group->shared->slots[rank];
        bool gone = rank != group->rank && (atomic_load(&slot->left) || peer_is_dead(group, rank));
        /* It may have entered the round just before it left. Then it has done its part. */
        if (gone && atomic_load(&slot->arrived) < round)
            abort_group(group, DRAY_EDEAD, rank);
    }
}

static void pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins as long as spinning has paid off. The budget halves with every failure, so that ranks
 * that share cores sleep at once, and it is tried again now and then. */
static bool spin(dray__group *group, uint64_t round)
{
    uint32_t budget = group->spin;
    if (budget < SPIN_MIN && ++group->sleeps % 64 == 0)
        budget = group->spin_max / 8;
    for (uint32_t i = 0; i < budget; i++) {
        if (missing(group, round) == group->world) {
            group->spin = group->spin < SPIN_MIN ? SPIN_MIN : group->spin + group->spin / 4;
            group->spin = group->spin > group->spin_max ? group->spin_max : group->spin;
            return true;
        }
        pause_core();
    }
    group->spin = group->spin / 2 < SPIN_MIN ? 0 : group->spin / 2;
    return false;
}

static void sleep_until_woken(dray__group *group, uint64_t round, int64_t timeout_ns)
{
    dray__group_header *shared = group->shared;
    /* Is done before the check, so that either the last rank sees this sleeper, or we see that
     * rank. */
    atomic_fetch_add(&shared->sleepers, 1);
    uint32_t seen = atomic_load(&shared->wake);
    if (missing(group, round) < group->world && atomic_load(&shared->aborted) == 0) {
        struct timespec span = {timeout_ns / DRAY__SECOND, timeout_ns % DRAY__SECOND};
        syscall(SYS_futex, &shared->wake, FUTEX_WAIT, seen, &span, NULL, 0);
    }
    atomic_fetch_sub(&shared->sleepers, 1);
}

static int wait_for_all(dray__group *group, dray__group_operation operation, uint64_t round,
                        int64_t deadline_ns, dray_error *error)
{
    if (missing(group, round) == group->world || spin(group, round))
        return DRAY_OK;
    int64_t watch = dray__now() + WATCH_NS;
    for (;;) {
        uint32_t rank = missing(group, round);
        /* Is checked first, because a round that all ranks entered is complete, even if the group
         * is aborted later. */
        if (rank == group->world)
            return DRAY_OK;
        int code = aborted(group, error);
        if (code != DRAY_OK)
            return code;
        int64_t now = dray__now();
        if (now >= watch || atomic_load(&group->shared->slots[rank].left)) {
            watch_peers(group, round);
            watch = now + WATCH_NS;
            continue;
        }
        if (now >= deadline_ns) {
            char text[DRAY__GROUP_TEXT];
            snprintf(text, sizeof text, "%s: rank %" PRIu32 " did not come before the deadline",
                     operation_name(operation), rank);
            abort_with_text(group, DRAY_ETIMEDOUT, text);
            continue;
        }
        int64_t until = watch < deadline_ns ? watch : deadline_ns;
        sleep_until_woken(group, round, until - now);
    }
}

/* Checks that all ranks are in the same operation, and aborts the group when they are not. */
static int same_call(dray__group *group, uint64_t round, dray_error *error)
{
    const dray__group_call *own = &group->shared->slots[group->rank].call[round & 1];
    for (uint32_t rank = 0; rank < group->world; rank++) {
        const dray__group_call *call = &group->shared->slots[rank].call[round & 1];
        if (call->operation == own->operation && call->size == own->size)
            continue;
        char text[DRAY__GROUP_TEXT];
        snprintf(text, sizeof text,
                 "%s of %" PRIu64 " expected, found rank %" PRIu32 " in %s of %" PRIu64,
                 operation_name(own->operation), own->size, rank, operation_name(call->operation),
                 call->size);
        abort_with_text(group, DRAY_EPROTO, text);
        return aborted(group, error);
    }
    return DRAY_OK;
}

int dray__group_meet(dray__group *group, dray__group_operation operation, uint64_t size,
                     int64_t deadline_ns, dray_error *error)
{
    int code = aborted(group, error);
    if (code != DRAY_OK)
        return code;
    uint64_t round = ++group->round;
    dray__group_slot *slot = &group->shared->slots[group->rank];
    slot->call[round & 1] = (dray__group_call){operation, size};
    atomic_store(&slot->arrived, round);
    if (missing(group, round) == group->world && atomic_load(&group->shared->sleepers) > 0)
        wake_all(group); /* The last rank wakes the others. */
    code = wait_for_all(group, operation, round, deadline_ns, error);
    return code == DRAY_OK ? same_call(group, round, error) : code;
}
