#include "trace/lengths.h"

#include "base/io.h"
#include "base/log.h"
#include "base/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char path[PATH_MAX]; /* empty for nowhere */
static dray__writer lines;  /* lines that are not in the file yet */

void dray__lengths_open(const char *spans_path)
{
    static const char ending[] = ".spans";
    size_t size = spans_path ? strlen(spans_path) : 0, cut = sizeof(ending) - 1;
    dray__writer_free(&lines);
    path[0] = 0;
    if (!size)
        return;
    if (size < cut || strcmp(spans_path + size - cut, ending) != 0)
        cut = 0;
    int length = snprintf(path, sizeof(path), "%.*s.lengths", (int)(size - cut), spans_path);
    if (length < 0 || (size_t)length >= sizeof(path))
        path[0] = 0;
    else
        unlink(path);
}

void dray__lengths_add(int64_t step, uint32_t slot, uint64_t prompt_tokens, uint64_t tokens,
                       int64_t begin_ns, int64_t end_ns)
{
    char line[160];
    int size = snprintf(line, sizeof(line),
                        "%" PRId64 " %" PRIu32 " %" PRIu64 " %" PRIu64 " %" PRId64 " %" PRId64 "\n",
                        step, slot, prompt_tokens, tokens, begin_ns, end_ns);
    if (path[0])
        dray__put_bytes(&lines, line, (size_t)size);
}

/* Appends whole lines only, because half a line would make the file unreadable. */
static int append(void)
{
    struct stat st;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666), failed = 0;
    if (fd < 0 || fstat(fd, &st) < 0 || dray__write_all(fd, lines.data, lines.size) < 0)
        failed = errno;
    if (failed && fd >= 0 && ftruncate(fd, st.st_size) < 0)
        unlink(path);
    if (fd >= 0)
        close(fd);
    return failed;
}

void dray__lengths_flush(void)
{
    int failed = lines.failed ? ENOMEM : lines.size ? append() : 0;
    if (failed) {
        dray__log(DRAY_LOG_WARN, "%s: no more responses are recorded: %s", path, strerror(failed));
        path[0] = 0;
    }
    dray__writer_free(&lines);
}
