/* Tests in which order the files of a joined host come home when the run cannot write one of them.
 */
#include "run/join/files.h"
#include "suite.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LARGE = 9 << 20, SMALL = 10 };

static char folder[] = "/tmp/dray-test-XXXXXX";

static void grow(const char *name, off_t size)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, size), 0);
    close(fd);
}

/* Returns how many bytes of the file are in the part. */
static int64_t bytes_of(const dray__host_files_part *part, const char *name)
{
    int64_t bytes = 0;
    size_t i;
    json_t *one;
    json_array_foreach(part->list, i, one)
    {
        if (strcmp(json_string_value(json_object_get(one, "name")), name) == 0)
            bytes += json_integer_value(json_object_get(one, "size"));
    }
    return bytes;
}

FIXTURE(begin)
{
    char path[64];
    assert_non_null(mkdtemp(folder));
    static const char *const parts[] = {"logs", "trace"};
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, parts[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    grow("logs/engine-0.log", LARGE);
    grow("logs/engine-1.log", SMALL);
    grow("trace/engine-1-1.lengths", SMALL);
    return 0;
}

FIXTURE(end)
{
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

TEST(test_the_others_do_not_wait_for_a_file_that_cannot_be_written)
{
    dray__host_files *files;
    dray__host_files_part part = {0};
    dray_error error;
    json_t *unkept = json_pack("[s]", "logs/engine-0.log"), *none = json_array();
    int64_t small = 0, lengths = 0;
    assert_int_equal(dray__host_files_open(folder, &files, &error), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(dray__host_files_take(files, 0, 0, &part, &error), 0);
        small += bytes_of(&part, "logs/engine-1.log");
        lengths += bytes_of(&part, "trace/engine-1-1.lengths");
        dray__host_files_took(files, unkept);
    }
    assert_int_equal(small, SMALL);
    assert_int_equal(lengths, SMALL);
    assert_false(part.more);
    assert_in_range(bytes_of(&part, "logs/engine-0.log"), 1, 64 << 10);
    /* Once it can be written, all of it comes. */
    int64_t large = 0;
    for (int i = 0; i < 8 && large < LARGE; i++) {
        assert_int_equal(dray__host_files_take(files, 0, 0, &part, &error), 0);
        large += bytes_of(&part, "logs/engine-0.log");
        dray__host_files_took(files, none);
    }
    assert_int_equal(large, LARGE);
    json_decref(unkept);
    json_decref(none);
    dray__host_files_part_free(&part);
    dray__host_files_close(files);
}

SUITE(begin, end)
