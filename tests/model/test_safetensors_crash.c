/* Tests a writer that is killed, or whose system call fails, at any step of replacing a checkpoint.
 * A reader then finds either the old checkpoint or the new one, whole. The next writer succeeds and
 * leaves no files of earlier writers behind. */
#include <dray/model.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

/* The calls that change what a reader finds, in place of libc's. The countdown reaches zero before
 * the call that is to fail. */
static long countdown = -1;
static bool dies;

static bool fails(void)
{
    if (countdown < 0 || countdown-- > 0)
        return false;
    if (dies)
        _exit(42);
    errno = EIO;
    return true;
}

int renameat(int from_fd, const char *from, int to_fd, const char *to)
{
    return fails() ? -1 : (int)syscall(SYS_renameat2, from_fd, from, to_fd, to, 0);
}

int unlinkat(int fd, const char *name, int flags)
{
    return fails() ? -1 : (int)syscall(SYS_unlinkat, fd, name, flags);
}

/* Only counted: that bytes reach the disk cannot be seen here, and waiting for it is slow. */
int fsync(int fd)
{
    (void)fd;
    return fails() ? -1 : 0;
}

static char folder[80];

static void remove_all(void)
{
    char path[512];
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.')
            assert_int_equal(unlink(path), 0);
    }
    closedir(dir);
}

static int count_files(void)
{
    int count = 0;
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));)
        count += e->d_name[0] != '.';
    closedir(dir);
    return count;
}

enum { TENSORS = 4, ELEMENTS = 100 };

/* Writes a checkpoint whose bytes are all `value`, in as many files. */
static int write_checkpoint(int value, int files)
{
    dray_layout *like, *out = NULL;
    uint8_t bytes[ELEMENTS];
    memset(bytes, value, sizeof bytes);
    dray_safetensors_options options = DRAY_SAFETENSORS_OPTIONS_INIT;
    options.max_file_bytes = files == 1 ? 0 : files == 2 ? 750 : 400;
    assert_int_equal(dray_layout_new(&like, NULL), DRAY_OK);
    for (int i = 0; i < TENSORS; i++) {
        char name[8] = {'t', (char)('0' + i), 0};
        assert_int_equal(
            dray_layout_add_tensor(like, name, DRAY_U8, 1, (int64_t[]){ELEMENTS}, NULL, NULL),
            DRAY_OK);
    }
    int status = dray_safetensors_begin(folder, like, &options, &out, NULL);
    dray_layout_free(like);
    if (status)
        return status;
    assert_int_equal(dray_layout_region_count(out), files);
    for (uint32_t i = 0; i < dray_layout_block_count(out); i++) {
        const dray_block *b = dray_layout_block(out, i);
        int fd = open(dray_layout_region(out, b->region)->name, O_WRONLY);
        assert_true(fd >= 0);
        assert_int_equal(pwrite(fd, bytes, sizeof bytes, (off_t)b->offset), sizeof bytes);
        close(fd);
    }
    status = dray_safetensors_finish(folder, out, NULL);
    dray_layout_free(out);
    return status;
}

/* The value that all bytes have; 0 where there is no checkpoint; fails on a mixture. */
static int read_checkpoint(void)
{
    dray_layout *l;
    if (dray_layout_safetensors(folder, &l, NULL))
        return 0;
    int value = 0;
    assert_int_equal(dray_layout_tensor_count(l), TENSORS);
    for (uint32_t i = 0; i < dray_layout_block_count(l); i++) {
        const dray_block *b = dray_layout_block(l, i);
        uint8_t bytes[ELEMENTS];
        int fd = open(dray_layout_region(l, b->region)->name, O_RDONLY);
        assert_true(fd >= 0);
        assert_int_equal(pread(fd, bytes, sizeof bytes, (off_t)b->offset), sizeof bytes);
        close(fd);
        for (int k = 0; k < ELEMENTS; k++) {
            assert_true(bytes[k] != 0 && (value == 0 || bytes[k] == value));
            value = bytes[k];
        }
    }
    dray_layout_free(l);
    return value;
}

/* Replaces checkpoint 1 by checkpoint 2, which stops at the nth call. True when it got through. */
static bool stop_at(long n, bool dying, int from, int to)
{
    remove_all();
    countdown = -1;
    assert_int_equal(write_checkpoint(1, from), DRAY_OK);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dies = dying;
        countdown = n;
        _exit(write_checkpoint(2, to) == DRAY_OK ? (countdown >= 0 ? 0 : 43) : 44);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    int found = read_checkpoint();
    if (found == 0)
        fail_msg("%d to %d files, stopped at call %ld: no checkpoint", from, to, n);
    if (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 43)
        assert_int_equal(found, 2);
    assert_int_equal(write_checkpoint(3, from), DRAY_OK); /* the next one is not disturbed */
    assert_int_equal(read_checkpoint(), 3);
    assert_int_equal(count_files(), from + (from > 1));
    return WEXITSTATUS(status) == 0;
}

TEST(every_step)
{
    static const int files[] = {1, 2, 4};
    for (int dying = 0; dying <= 1; dying++)
        for (int i = 0; i < 3; i++)
            for (int j = 0; j < 3; j++) {
                long n = 0;
                while (!stop_at(n, dying, files[i], files[j]))
                    n++;
                assert_true(n >= 3);
            }
}

FIXTURE(make_folder)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dray-crash-XXXXXX", tmp && strlen(tmp) < 40 ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

FIXTURE(remove_folder)
{
    remove_all();
    return rmdir(folder);
}

SUITE(make_folder, remove_folder)
