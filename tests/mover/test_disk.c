/* Tests reads and writes of files in the background. Random ranges are compared with plain reads
 * and writes, by io_uring and by threads, on a disk and on a file system without direct I/O.
 * Answers are short, fail, or end with the file. */
#include "base/random.h"
#include "mover/disk.h"
#include "seed.h"
#include "suite.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FILE_BYTES = (3 << 20) + 1234, IOS = 200, ROOM = 256 << 10 };

static uint64_t seed, drawn;
static uint8_t *staging, *expected;

static uint64_t draw(uint64_t below)
{
    return dray__random_u64(seed, 0, drawn++) % below;
}

FIXTURE(start)
{
    seed = test_seed();
    staging = aligned_alloc(DRAY__IO_ALIGN, (size_t)IOS * ROOM);
    expected = malloc(FILE_BYTES);
    return staging && expected ? 0 : -1;
}

FIXTURE(stop)
{
    free(staging);
    free(expected);
    return 0;
}

static int make_file(const char *folder, char *path, size_t capacity)
{
    snprintf(path, capacity, "%s/dray-test-disk-XXXXXX", folder);
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    for (size_t i = 0; i < FILE_BYTES; i += 4) {
        uint32_t word = (uint32_t)(i * 2654435761u + seed);
        memcpy(expected + i, &word, FILE_BYTES - i < 4 ? FILE_BYTES - i : 4);
    }
    assert_int_equal(pwrite(fd, expected, FILE_BYTES, 0), FILE_BYTES);
    assert_int_equal(fsync(fd), 0);
    return fd;
}

static void wait_all(dray__disk *disk)
{
    while (dray__disk_under_way(disk)) {
        struct pollfd p = {.fd = dray__disk_fd(disk), .events = POLLIN};
        if (!dray__disk_take(disk))
            assert_int_equal(poll(&p, 1, 30000), 1);
    }
    assert_null(dray__disk_take(disk));
    struct pollfd p = {.fd = dray__disk_fd(disk), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 0), 0); /* quiet when nothing is there */
}

/* Half of them aligned, the others anywhere, also beyond the file's end. */
static dray__io random_io(dray__disk_file *file, uint32_t i, bool write)
{
    dray__io io = {.file = file, .write = write};
    bool aligned = draw(2);
    uint64_t step = aligned ? DRAY__IO_ALIGN : 1;
    io.bytes = (1 + draw((ROOM - DRAY__IO_ALIGN) / step)) * step;
    io.offset = draw(FILE_BYTES / step) * step;
    if (write && io.offset + io.bytes > FILE_BYTES) {
        io.bytes = FILE_BYTES - io.offset;
    } else if (!write) {
        uint64_t left = FILE_BYTES - io.offset;
        io.least = left < io.bytes ? left : io.bytes;
    }
    io.data = staging + (size_t)i * ROOM + (aligned ? 0 : draw(DRAY__IO_ALIGN));
    return io;
}

static void random_ranges(dray__disk_way way, const char *folder)
{
    char path[200];
    dray__disk *disk;
    dray_error error;
    int rc = dray__disk_open(way, &disk, &error);
    if (rc == DRAY_EUNSUPPORTED && way == DRAY__DISK_URING)
        return; /* this container has none */
    assert_int_equal(rc, DRAY_OK);
    int fd = make_file(folder, path, sizeof path);
    dray__disk_file file;
    dray__disk_file_open(&file, fd, true, path);
    static dray__io ios[IOS];
    for (int round = 0; round < 4; round++) {
        for (uint32_t i = 0; i < IOS; i++) {
            ios[i] = random_io(&file, i, false);
            memset(ios[i].data, 0xEE, ios[i].bytes);
            dray__disk_submit(disk, &ios[i]);
        }
        wait_all(disk);
        for (uint32_t i = 0; i < IOS; i++) {
            assert_int_equal(dray__io_result(&ios[i], &error), DRAY_OK);
            assert_memory_equal(ios[i].data, expected + ios[i].offset, ios[i].least);
        }
        /* Written one after the other: they overlap. */
        for (uint32_t i = 0; i < IOS / 4; i++) {
            ios[i] = random_io(&file, i, true);
            for (size_t k = 0; k < ios[i].bytes; k++)
                ((uint8_t *)ios[i].data)[k] = (uint8_t)draw(256);
            memcpy(expected + ios[i].offset, ios[i].data, ios[i].bytes);
            dray__disk_submit(disk, &ios[i]);
            wait_all(disk);
            assert_int_equal(dray__io_result(&ios[i], &error), DRAY_OK);
        }
        uint8_t *whole = malloc(FILE_BYTES);
        assert_int_equal(pread(fd, whole, FILE_BYTES, 0), FILE_BYTES);
        assert_memory_equal(whole, expected, FILE_BYTES);
        free(whole);
    }
    dray__disk_close(disk);
    dray__disk_file_close(&file);
    close(fd);
    unlink(path);
}

TEST(ranges_come_as_they_are)
{
    const char *tmp = getenv("TMPDIR");
    random_ranges(DRAY__DISK_THREADS, tmp ? tmp : "/tmp");
    random_ranges(DRAY__DISK_URING, tmp ? tmp : "/tmp");
    struct statvfs room;
    if (statvfs("/dev/shm", &room) == 0 && room.f_bavail * room.f_frsize > 64u << 20) {
        random_ranges(DRAY__DISK_THREADS, "/dev/shm"); /* no direct I/O there */
        random_ranges(DRAY__DISK_URING, "/dev/shm");
    }
}

TEST(files_that_end_early_are_named)
{
    char path[200];
    dray_error error;
    for (int way = DRAY__DISK_THREADS; way <= DRAY__DISK_URING; way++) {
        dray__disk *disk;
        if (dray__disk_open((dray__disk_way)way, &disk, &error))
            continue;
        int fd = make_file("/tmp", path, sizeof path);
        dray__disk_file file;
        dray__disk_file_open(&file, fd, false, path);
        dray__io io = {.file = &file,
                       .data = staging,
                       .offset = (FILE_BYTES & ~(DRAY__IO_ALIGN - 1)) - DRAY__IO_ALIGN,
                       .bytes = 4 * DRAY__IO_ALIGN,
                       .least = 3 * DRAY__IO_ALIGN};
        dray__disk_submit(disk, &io);
        wait_all(disk);
        assert_int_equal(dray__io_result(&io, &error), DRAY_EFORMAT);
        assert_non_null(strstr(error.message, path));
        io.file = &(dray__disk_file){.fd = -1, .direct = -1, .name = "nothing"};
        dray__disk_submit(disk, &io);
        wait_all(disk);
        assert_int_equal(dray__io_result(&io, &error), DRAY_ESYS);
        assert_int_equal(error.raw, EBADF);
        dray__disk_close(disk);
        dray__disk_file_close(&file);
        close(fd);
        unlink(path);
    }
}

/* Every third piece is cut short, one is lost. */
static int bad_disk(void *user, const dray__io *io)
{
    (void)io;
    int *left = user;
    int turn = __atomic_sub_fetch(left, 1, __ATOMIC_RELAXED);
    return turn == 0 ? EIO : (turn % 3 == 0 ? -1 : 0);
}

TEST(errors_and_short_answers)
{
    char path[200];
    dray_error error;
    static dray__io ios[IOS];
    for (int way = DRAY__DISK_THREADS; way <= DRAY__DISK_URING; way++) {
        dray__disk *disk;
        int left = 100, failed = 0;
        if (dray__disk_open((dray__disk_way)way, &disk, &error))
            continue;
        int fd = make_file("/tmp", path, sizeof path);
        dray__disk_file file;
        dray__disk_file_open(&file, fd, false, path);
        dray__disk_faults(bad_disk, &left);
        for (uint32_t i = 0; i < IOS; i++) {
            ios[i] = random_io(&file, i, false);
            dray__disk_submit(disk, &ios[i]);
        }
        wait_all(disk);
        dray__disk_faults(NULL, NULL);
        for (uint32_t i = 0; i < IOS; i++) {
            if (dray__io_result(&ios[i], &error)) {
                failed++;
                assert_int_equal(error.raw, EIO);
            } else {
                assert_memory_equal(ios[i].data, expected + ios[i].offset, ios[i].least);
            }
        }
        assert_int_equal(failed, 1);
        dray__disk_close(disk);
        dray__disk_file_close(&file);
        close(fd);
        unlink(path);
    }
}

/* ---- a kernel that accepts nothing ----------------------------------------------------------- */

/* The calling thread's rings are refused as by a kernel without memory for them, where such a
 * filter is possible. */
static void refuse_rings(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_enter, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* The work of a thread that has the filter: reads of a file, `before` of them ahead of it. */
typedef struct refused_reads {
    dray__disk *disk;
    dray__disk_file file;
    dray__io ios[IOS];
    uint32_t before, taken;
} refused_reads;

static void *read_refused(void *user)
{
    refused_reads *r = user;
    for (uint32_t i = 0; i < IOS; i++) {
        if (i == r->before)
            refuse_rings();
        dray__disk_submit(r->disk, &r->ios[i]);
    }
    for (bool more = true; more && r->taken < IOS;) {
        struct pollfd p = {.fd = dray__disk_fd(r->disk), .events = POLLIN};
        if (dray__disk_take(r->disk))
            r->taken++;
        else
            more = poll(&p, 1, 20000) == 1;
    }
    return NULL;
}

TEST(reads_that_the_kernel_does_not_accept_are_done)
{
    static const uint32_t befores[] = {0, 1, IOS / 2};
    static refused_reads r;
    char path[200];
    dray_error error;
    for (size_t k = 0; k < sizeof befores / sizeof *befores; k++) {
        r = (refused_reads){.before = befores[k]};
        if (dray__disk_open(DRAY__DISK_URING, &r.disk, &error))
            return; /* this container has none */
        int fd = make_file("/tmp", path, sizeof path);
        dray__disk_file_open(&r.file, fd, false, path);
        for (uint32_t i = 0; i < IOS; i++)
            r.ios[i] = random_io(&r.file, i, false);
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, read_refused, &r), 0);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(r.taken, IOS);
        assert_null(dray__disk_take(r.disk));
        for (uint32_t i = 0; i < IOS; i++) {
            assert_int_equal(dray__io_result(&r.ios[i], &error), DRAY_OK);
            assert_memory_equal(r.ios[i].data, expected + r.ios[i].offset, r.ios[i].least);
        }
        dray__disk_close(r.disk);
        dray__disk_file_close(&r.file);
        close(fd);
        unlink(path);
    }
}

/* ---- a fork ---------------------------------------------------------------------------------- */

/* A child that closes its copy neither waits, nor takes what its parent waits for. */
TEST(a_child_leaves_reads_to_its_parent)
{
    static dray__io ios[IOS];
    char path[200];
    dray_error error;
    for (int way = DRAY__DISK_THREADS; way <= DRAY__DISK_URING; way++) {
        dray__disk *disk;
        dray__disk_file file;
        int status;
        if (dray__disk_open((dray__disk_way)way, &disk, &error))
            continue;
        int fd = make_file("/tmp", path, sizeof path);
        dray__disk_file_open(&file, fd, false, path);
        for (uint32_t i = 0; i < IOS; i++) {
            ios[i] = random_io(&file, i, false);
            dray__disk_submit(disk, &ios[i]);
        }
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            dray__disk_close(disk);
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        wait_all(disk);
        for (uint32_t i = 0; i < IOS; i++) {
            assert_int_equal(dray__io_result(&ios[i], &error), DRAY_OK);
            assert_memory_equal(ios[i].data, expected + ios[i].offset, ios[i].least);
        }
        dray__disk_close(disk);
        dray__disk_file_close(&file);
        close(fd);
        unlink(path);
    }
}

SUITE(start, stop)
