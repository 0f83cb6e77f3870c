#include "store/blocks.h"

#include "base/array.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/thread.h"
#include "store/deadline.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { IN_MEMORY = 8 };
#define DEFAULT_BYTES (UINT64_C(8) << 30)
#define LOCK_PATIENCE DRAY__SECOND

/* ---- in files ----------------------------------------------------------------------------------
 *
 * FOLDER/blocks/KEY-BLOCK has the bytes and their XXH3. FOLDER/blocks/.used has a u64, the total
 * bytes of the files, which is changed under the file's lock. An error here only costs a fetch. */

typedef struct kept_block {
    char name[48];
    struct timespec used;
    uint64_t bytes;
} kept_block;

static uint64_t most_bytes(void)
{
    const char *text = getenv("DRAY_CACHE_BYTES");
    char *end;
    uint64_t value = text && *text ? strtoull(text, &end, 10) : DEFAULT_BYTES;
    return text && *text && *end ? 0 : value;
}

static bool folder_path(char out[PATH_MAX])
{
    if (!most_bytes() || !dray__cache_folder(out, PATH_MAX - 64))
        return false;
    strcat(out, "/blocks");
    return mkdir(out, 0700) == 0 || errno == EEXIST;
}

static bool kept_read(uint64_t key, uint64_t block, void *data, uint64_t size)
{
    char path[PATH_MAX];
    uint64_t sum;
    struct stat st;
    if (!folder_path(path))
        return false;
    snprintf(path + strlen(path), 48, "/%016" PRIx64 "-%" PRIu64, key, block);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    bool is = fstat(fd, &st) == 0 && st.st_uid == geteuid() &&
              (uint64_t)st.st_size == size + sizeof sum &&
              dray__read_at(fd, data, (size_t)size, 0) == 0 &&
              dray__read_at(fd, &sum, sizeof sum, (off_t)size) == 0 &&
              dray__hash(data, (size_t)size) == sum;
    if (is)
        futimens(fd, NULL); /* a block that is used is removed later */
    close(fd);
    return is;
}

static int by_use(const void *a, const void *b)
{
    const kept_block *x = a, *y = b;
    if (x->used.tv_sec != y->used.tv_sec)
        return x->used.tv_sec < y->used.tv_sec ? -1 : 1;
    return (x->used.tv_nsec > y->used.tv_nsec) - (x->used.tv_nsec < y->used.tv_nsec);
}

/* Removes the blocks that were used longest ago until three quarters of `most` are left. Returns
 * the bytes that are left. */
static uint64_t make_room(const char *folder, uint64_t most)
{
    kept_block *all = NULL;
    uint64_t count = 0, capacity = 0, total = 0;
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        kept_block one = {0};
        struct stat st;
        if (entry->d_name[0] == '.' || strlen(entry->d_name) >= sizeof one.name ||
            fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW))
            continue;
        strcpy(one.name, entry->d_name);
        one.used = st.st_mtim;
        one.bytes = (uint64_t)st.st_size;
        total += one.bytes;
        if (!DRAY__PUSH(all, count, capacity, one))
            break;
    }
    if (count)
        qsort(all, count, sizeof *all, by_use);
    for (uint64_t i = 0; i < count && total > most / 4 * 3; i++)
        if (unlinkat(dirfd(dir), all[i].name, 0) == 0)
            total -= all[i].bytes;
    free(all);
    if (dir)
        closedir(dir);
    return total;
}

/* Ends the lock. Closing is not enough: a process that was forked meanwhile has the descriptor,
 * too. */
static void unlock(int fd)
{
    flock(fd, LOCK_UN);
    close(fd);
}

/* Takes the lock. A process that stands still with it is waited for once, and the lock is only
 * tried from then on, until it is free again. Where others take turns with it, the number of used
 * bytes changes meanwhile. */
static bool take_lock(int fd)
{
    static _Atomic bool late;
    int64_t deadline = dray__deadline(late ? 0 : LOCK_PATIENCE);
    uint64_t before = 0, after = 0;
    bool taken, read = pread(fd, &before, sizeof before, 0) == sizeof before;
    while (!(taken = flock(fd, LOCK_EX | LOCK_NB) == 0) && errno == EWOULDBLOCK &&
           dray__now() < deadline)
        poll(NULL, 0, 1);
    if (read && pread(fd, &after, sizeof after, 0) != sizeof after)
        after = before;
    late = !taken && before == after;
    return taken;
}

/* Reserves bytes of the limit. Returns the descriptor with the lock, or -1 when there is no room or
 * no lock. A block is written under the lock, so that it is counted when others make room. */
static int reserve(const char *folder, uint64_t bytes)
{
    char path[PATH_MAX];
    uint64_t used = 0, most = most_bytes();
    snprintf(path, sizeof path, "%.*s/.used", PATH_MAX - 16, folder);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 || bytes > most || !take_lock(fd)) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    bool known = pread(fd, &used, sizeof used, 0) == sizeof used;
    if (!known || used > most - bytes)
        used = make_room(folder, most - bytes);
    bool fits = used <= most - bytes;
    used += fits ? bytes : 0;
    fits = pwrite(fd, &used, sizeof used, 0) == sizeof used && fits;
    if (!fits)
        unlock(fd);
    return fits ? fd : -1;
}

static void keep(uint64_t key, uint64_t block, const void *data, uint64_t size)
{
    char folder[PATH_MAX], path[PATH_MAX], partial[PATH_MAX];
    static _Atomic uint32_t number;
    uint64_t sum = dray__hash(data, (size_t)size);
    int room = folder_path(folder) ? reserve(folder, size + sizeof sum) : -1;
    if (room < 0)
        return;
    snprintf(path, sizeof path, "%.*s/%016" PRIx64 "-%" PRIu64, PATH_MAX - 64, folder, key, block);
    snprintf(partial, sizeof partial, "%.*s/p-%d-%" PRIu32, PATH_MAX - 64, folder, (int)getpid(),
             atomic_fetch_add(&number, 1));
    int fd = open(partial, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool written = fd >= 0 && dray__write_all(fd, data, (size_t)size) == 0 &&
                   dray__write_all(fd, &sum, sizeof sum) == 0;
    if (fd >= 0 && close(fd))
        written = false;
    if (fd >= 0 && (!written || rename(partial, path)))
        unlink(partial);
    unlock(room);
}

/* ---- in memory ------------------------------------------------------------------------------- */

typedef struct memory_block {
    uint64_t key, block, size, used;
    uint8_t *data; /* NULL while it is being fetched */
    bool taken;
} memory_block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* initialised by the first reader */
static memory_block held[IN_MEMORY];
static uint64_t clock_of_use;

static memory_block *find(uint64_t key, uint64_t block, uint64_t size)
{
    for (size_t i = 0; i < IN_MEMORY; i++)
        if (held[i].taken && held[i].key == key && held[i].block == block && held[i].size == size)
            return &held[i];
    return NULL;
}

/* Returns the block that was used longest ago; NULL when all are being fetched. */
static memory_block *oldest(void)
{
    memory_block *best = NULL;
    for (size_t i = 0; i < IN_MEMORY; i++) {
        memory_block *h = &held[i];
        if (!h->taken)
            return h;
        if (h->data && (!best || h->used < best->used))
            best = h;
    }
    return best;
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

/* The threads that were fetching blocks do not exist in the child, so it fetches these itself. */
static void in_child(void)
{
    for (size_t i = 0; i < IN_MEMORY; i++)
        if (held[i].taken && !held[i].data)
            held[i] = (memory_block){0};
    dray__cond_init(&changed);
    pthread_mutex_unlock(&lock);
}

static void first_use(void)
{
    dray__cond_init(&changed);
    pthread_atfork(before_fork, after_fork, in_child);
}

/* Gets a block from a file or by fetching it. Called without the lock. */
static int obtain(memory_block *h, dray__block_fetch_fn fetch, void *user, uint8_t *data,
                  dray_error *error)
{
    if (kept_read(h->key, h->block, data, h->size))
        return DRAY_OK;
    int rc = fetch(user, h->block, data, h->size, error);
    if (!rc)
        keep(h->key, h->block, data, h->size);
    return rc;
}

/* Fills the entry of a block, or frees the entry. Called with the lock. */
static int fill(memory_block *h, dray__block_fetch_fn fetch, void *user, dray_error *error)
{
    pthread_mutex_unlock(&lock);
    uint8_t *data = malloc((size_t)h->size);
    int rc = data ? obtain(h, fetch, user, data, error) : dray__nomem(error);
    if (rc)
        free(data);
    pthread_mutex_lock(&lock);
    if (rc)
        *h = (memory_block){0};
    else
        h->data = data;
    pthread_cond_broadcast(&changed);
    return rc;
}

int dray__blocks_read(uint64_t key, uint64_t block, uint64_t size, uint64_t from, uint64_t bytes,
                      void *out, dray__block_fetch_fn fetch, void *user, dray_error *error)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int rc = DRAY_OK;
    pthread_once(&once, first_use);
    pthread_mutex_lock(&lock);
    memory_block *h;
    for (;;) {
        h = find(key, block, size);
        if (h && h->data)
            break;
        memory_block *place = h ? NULL : oldest();
        if (!place && dray__store_is_late()) {
            rc = dray__fail(
                error, DRAY_ETIMEDOUT,
                "a block of %llu bytes: another thread had not fetched it at the deadline",
                (unsigned long long)size);
            break;
        }
        if (!place) {
            dray__cond_wait(&changed, &lock, dray__store_deadline());
            continue;
        }
        free(place->data);
        *place = (memory_block){.key = key, .block = block, .size = size, .taken = true};
        rc = fill(place, fetch, user, error);
        h = place;
        break;
    }
    if (!rc) {
        memcpy(out, h->data + from, (size_t)bytes);
        h->used = ++clock_of_use;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}
