/* Tests losing power while a journal is written, sector by sector. The disk of this test applies
 * every write at once, and remembers the former bytes until a sync that began later has returned.
 * Power may be lost at any moment of any write. Each sector that is not safe then has its last
 * bytes, earlier ones, or its first ones, which may be whole records of the file's former life. The
 * journal must hold all records that were acknowledged, and none that was never added. */
#include "base/clock.h"
#include "base/random.h"
#include "queue/journal/journal.h"
#include "seed.h"
#include "suite.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    SECTOR = 512,
    RECORDS = 400,
    OWNERS = 5,
    LARGE = 3 << 20, /* bytes of the largest record: several blocks of what writes it */
    UNDOS_MAX = 4096
};

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "test_records.c:%d: %s (seed %llu, draw %llu)\n", __LINE__,            \
                    #condition, (unsigned long long)seed, (unsigned long long)draws);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

typedef struct undo { /* of one write */
    ino_t file;
    uint64_t number;
    int64_t at;
    size_t size;
    uint8_t *before;
} undo;

static uint64_t seed, draws;
static pthread_mutex_t disk = PTHREAD_MUTEX_INITIALIZER; /* of what follows, and of the files */
static undo undos[UNDOS_MAX];
static size_t undo_count;
static uint64_t writes;
static int failures; /* of writes and syncs that are to come */
static char folder[64], path[96], image[96];
static atomic_uint_least64_t acked;  /* up to this number */
static uint64_t newest;              /* the last number that was added, when... */
static atomic_uint_least64_t adding; /* ...it may have been */
static atomic_uint images;

/* Draws under the disk's lock, but in the main thread before it starts and after it ends. */
static uint64_t draw(uint64_t below)
{
    return dray__random_u64(seed, 0, draws++) % below;
}

/* ---- records: what is in one follows from its number ----------------------------------------- */

static uint64_t size_of(uint64_t seq)
{
    uint64_t r = dray__random_u64(seed, 1, seq);
    return r % 16 == 0 ? r / 16 % LARGE : r % 16 < 4 ? r / 16 % 40000 : r / 16 % 300;
}

static uint8_t byte_of(uint64_t seq, uint64_t at)
{
    return (uint8_t)((seq * 0x9E3779B97F4A7C15u + at * (at >> 9 | 1)) >> 7);
}

static int fetch(void *user, const dray__journal_piece *piece, void *out, dray_error *error)
{
    uint8_t *to = out;
    (void)user;
    (void)error;
    for (uint64_t i = 0; i < piece->bytes; i++)
        to[i] = byte_of(piece->source, piece->offset + i);
    return DRAY_OK;
}

typedef struct seen {
    uint64_t last, compacted; /* compacted: the last record of kind 2 */
    bool there[RECORDS * 2];
} seen;

static atomic_uint jobs[RECORDS * 2]; /* 1 and the owners, as bits, that a compaction keeps */

/* Kind 1: bytes. Kind 2: the file was written anew, keeping the owners in the body. */
static int check_record(void *user, const dray__journal_record *record, dray_error *error)
{
    seen *s = user;
    (void)error;
    const uint8_t *body = record->body;
    REQUIRE(record->seq <= atomic_load(&adding));
    s->there[record->seq] = true;
    s->last = record->seq;
    if (record->kind == 2) {
        s->compacted = record->seq;
        REQUIRE(body[0] == (atomic_load(&jobs[record->seq]) | 1));
        return DRAY_OK;
    }
    REQUIRE(record->kind == 1 && record->size == size_of(record->seq));
    for (uint64_t i = 0; i < record->size; i++)
        if (body[i] != byte_of(record->seq, i))
            REQUIRE(!"the bytes are another record's");
    return DRAY_OK;
}

static uint32_t owner_of(uint64_t seq)
{
    return 1 + (uint32_t)(seq / 7 % OWNERS);
}

/* ---- the disk -------------------------------------------------------------------------------- */

static ino_t inode_of(int fd)
{
    struct stat st;
    REQUIRE(fstat(fd, &st) == 0);
    return st.st_ino;
}

/* Each sector that is not safe as it is, or as one of the writes to it found it. */
static void lose_sectors(int to, ino_t file)
{
    for (size_t i = undo_count; i-- > 0;) {
        const undo *u = &undos[i];
        bool all = draw(4) == 0, none = !all && draw(2) == 0;
        for (size_t at = 0; u->file == file && at < u->size;) {
            size_t room = SECTOR - (size_t)((u->at + (int64_t)at) % SECTOR);
            room = room < u->size - at ? room : u->size - at;
            if (all || (!none && draw(16) == 0))
                REQUIRE(pwrite(to, u->before + at, room, u->at + (int64_t)at) == (ssize_t)room);
            at += room;
        }
    }
}

/* What would be found if power went now. */
static void cut_power(void)
{
    static uint8_t block[1 << 20];
    seen *s = calloc(1, sizeof *s);
    dray_error error = {0};
    uint64_t least = atomic_load(&acked), end, last;
    int from = open(path, O_RDONLY | O_CLOEXEC),
        to = open(image, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    REQUIRE(s && from >= 0 && to >= 0);
    ssize_t n;
    for (int64_t at = 0; (n = pread(from, block, sizeof block, at)) > 0; at += n)
        REQUIRE(pwrite(to, block, (size_t)n, at) == n);
    lose_sectors(to, inode_of(from));
    close(from);
    close(to);
    int rc = dray__journal_read(image, check_record, s, &end, &last, &error);
    if (rc)
        fprintf(stderr, "%s: %s\n", dray_error_name(rc), error.message);
    REQUIRE(!rc);
    for (uint64_t seq = 1; seq <= least; seq++) {
        bool settled = s->there[seq] || jobs[seq];
        for (uint64_t job = seq + 1; job <= s->compacted && !settled; job++)
            settled = jobs[job] && !(jobs[job] >> owner_of(seq) & 1);
        if (!settled)
            REQUIRE(!"what was acknowledged is not there");
    }
    images++;
    free(s);
}

/* Of writes to a file up to a number. */
static void forget_undos(ino_t file, uint64_t number)
{
    size_t kept = 0;
    for (size_t i = 0; i < undo_count; i++) {
        if (undos[i].file == file && undos[i].number <= number)
            free(undos[i].before);
        else
            undos[kept++] = undos[i];
    }
    undo_count = kept;
}

static int failing(int errnum)
{
    errno = errnum;
    return -1;
}

static int disk_write(int fd, const void *data, size_t size, int64_t at)
{
    pthread_mutex_lock(&disk);
    REQUIRE(undo_count < UNDOS_MAX);
    ino_t file = inode_of(fd);
    if (lseek(fd, 0, SEEK_END) == 0) /* a new one, whose number may have been another's */
        forget_undos(file, UINT64_MAX);
    undo *u = &undos[undo_count++];
    *u = (undo){file, ++writes, at, size, calloc(1, size)};
    REQUIRE(u->before && pread(fd, u->before, size, at) >= 0);
    bool fails = failures && draw(20) == 0;
    if (fails)
        size = (size_t)draw(size);
    REQUIRE(pwrite(fd, data, size, at) == (ssize_t)size);
    if (draw(12) == 0)
        cut_power();
    failures -= fails;
    pthread_mutex_unlock(&disk);
    return fails ? failing(ENOSPC) : 0;
}

/* What was written before it began. */
static int disk_sync(int fd)
{
    pthread_mutex_lock(&disk);
    ino_t file = inode_of(fd);
    uint64_t before = writes;
    bool fails = failures && draw(20) == 0;
    failures -= fails;
    pthread_mutex_unlock(&disk);
    usleep(200);
    pthread_mutex_lock(&disk);
    if (!fails)
        forget_undos(file, before);
    if (draw(12) == 0)
        cut_power();
    pthread_mutex_unlock(&disk);
    return fails ? failing(EIO) : 0;
}

/* ---- the test -------------------------------------------------------------------------------- */

static dray__journal *journal;
static bool compacting;

static void take_done(void)
{
    uint64_t safe;
    int code;
    dray_error error;
    dray__journal_entry *done = dray__journal_done(journal, &safe, &code, &error);
    atomic_store(&acked, safe);
    for (dray__journal_entry *next; done; done = next) {
        next = done->next;
        if (done->compact) /* or it failed, as it may */
            compacting = false;
        dray__entry_free(done);
    }
}

static void wait_for(uint64_t number)
{
    int64_t deadline = dray__deadline(30 * DRAY__SECOND);
    struct pollfd p = {.fd = dray__journal_fd(journal), .events = POLLIN};
    while (atomic_load(&acked) < number && dray__now() < deadline) {
        poll(&p, 1, 100);
        take_done();
    }
    REQUIRE(atomic_load(&acked) >= number);
}

static void add(uint64_t random)
{
    dray__journal_entry *entry = calloc(1, sizeof *entry);
    uint64_t seq = newest + 1, size = size_of(seq), inside = size < 100 ? size : 100;
    REQUIRE(entry);
    entry->kind = 1;
    entry->owner = owner_of(seq);
    if (!compacting && random % 16 == 0) {
        entry->kind = 2;
        entry->owner = 0;
        entry->compact = compacting = true;
        entry->keep = calloc(OWNERS, sizeof *entry->keep);
        uint32_t bits = (uint32_t)(random >> 32) & 0x3E;
        for (uint32_t owner = 1; owner <= OWNERS; owner++)
            if (bits >> owner & 1)
                entry->keep[entry->keep_count++] = owner;
        dray__put_u8(&entry->body, (uint8_t)(bits | 1));
        atomic_store(&jobs[seq], bits | 1);
    } else {
        for (uint64_t i = 0; i < inside; i++)
            dray__put_u8(&entry->body, byte_of(seq, i));
        entry->pieces = calloc(2, sizeof *entry->pieces);
        uint64_t half = (size - inside) / 2;
        entry->pieces[0] = (dray__journal_piece){seq, inside, half, 0};
        entry->pieces[1] = (dray__journal_piece){seq, inside + half, size - inside - half, 0};
        entry->piece_count = 2;
    }
    atomic_store(&adding, seq);
    newest = seq;
    dray__journal_add(journal, entry);
}

static void start(uint64_t end, uint64_t last)
{
    static const dray__journal_files files = {disk_write, disk_sync};
    dray__journal_options o = {.path = path, .sync = true, .fetch = fetch, .files = &files};
    dray_error error;
    int rc = dray__journal_start(&o, end, last, &journal, &error);
    if (rc)
        fprintf(stderr, "%s: %s\n", dray_error_name(rc), error.message);
    REQUIRE(!rc);
}

static void stop(void)
{
    dray__journal_entry *left = dray__journal_stop(journal);
    for (dray__journal_entry *next; left; left = next) {
        next = left->next;
        dray__entry_free(left);
    }
    compacting = false;
    for (size_t i = 0; i < undo_count; i++)
        free(undos[i].before);
    undo_count = 0;
}

FIXTURE(end_of_test)
{
    unlink(path);
    unlink(image);
    newest = draws = 0;
    memset(jobs, 0, sizeof jobs);
    failures = 0;
    atomic_store(&acked, 0);
    return 0;
}

TEST_WITHIN(test_power_cuts, NULL, end_of_test)
{
    uint64_t end = 0, last = 0;
    start(0, 0);
    for (int i = 0; i < RECORDS; i++) {
        add(dray__random_u64(seed, 2, (uint64_t)i));
        uint64_t what = dray__random_u64(seed, 3, (uint64_t)i);
        if (what % 40 == 0) {
            pthread_mutex_lock(&disk);
            failures = 1 + (int)(what >> 32) % 2;
            pthread_mutex_unlock(&disk);
        }
        if (what % 3 == 0 || (newest & 15) == 0)
            wait_for(newest);
        else
            take_done();
        if (what % 60 == 1) { /* a restart, in good order */
            wait_for(newest);
            stop();
            seen *s = calloc(1, sizeof *s);
            dray_error error;
            REQUIRE(s && !dray__journal_read(path, check_record, s, &end, &last, &error));
            REQUIRE(s->last == last && last <= newest);
            while (newest > last) /* jobs' numbers, which have left no record */
                jobs[newest--] = 0;
            atomic_store(&acked, last);
            atomic_store(&adding, last);
            free(s);
            start(end, last);
        }
    }
    wait_for(newest);
    stop();
    printf("%u power cuts\n", atomic_load(&images));
    assert_true(atomic_load(&images) > 20);
}

/* ---- files that are no journals ---------------------------------------------------------------
 */

static int read_file(const void *data, size_t size, uint64_t *end)
{
    uint64_t last;
    dray_error error;
    seen *s = calloc(1, sizeof *s);
    FILE *file = fopen(image, "we");
    REQUIRE(s && file && fwrite(data, 1, size, file) == size && fclose(file) == 0);
    int rc = dray__journal_read(image, check_record, s, end, &last, &error);
    free(s);
    return rc;
}

TEST_WITHIN(test_heads, NULL, end_of_test)
{
    uint8_t data[4096] = {0};
    uint64_t end = 9;
    assert_int_equal(read_file(data, 0, &end), DRAY_OK);
    assert_int_equal(end, 0);
    assert_int_equal(read_file(data, sizeof data, &end), DRAY_OK); /* not one sector got there */
    assert_int_equal(end, 0);
    memcpy(data, "DRJR\1\0\1\0", 8); /* before there were heads */
    assert_int_equal(read_file(data, sizeof data, &end), DRAY_EVERSION);
    memset(data, 'x', sizeof data);
    assert_int_equal(read_file(data, sizeof data, &end), DRAY_ECHECKSUM);
    start(0, 0);
    add(1);
    wait_for(newest);
    stop();
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte = 0;
    assert_true(fd >= 0 && pread(fd, data, sizeof data, 0) > 64);
    for (off_t at = 0; at < 32; at += 5) {
        byte = data[at] ^ 4;
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
        seen *s = calloc(1, sizeof *s);
        uint64_t last;
        int rc = dray__journal_read(path, check_record, s, &end, &last, NULL);
        free(s);
        assert_int_equal(rc, DRAY_ECHECKSUM);
        assert_int_equal(pwrite(fd, &data[at], 1, at), 1);
    }
    close(fd);
}

/* ---- reading aside --------------------------------------------------------------------------- */

static atomic_uint read_aside;
static atomic_bool held;

static int count_aside(void *user, const dray__journal_record *record, dray_error *error)
{
    (void)user;
    (void)error;
    while (atomic_load(&held))
        usleep(1000);
    read_aside += record->seq != 0;
    return DRAY_OK;
}

/* The file is read while others are answered: what was added later is safe before it has ended. */
TEST_WITHIN(test_reads_aside, NULL, end_of_test)
{
    start(0, 0);
    held = true;
    for (int i = 0; i < 300; i++)
        add(1);
    dray__journal_entry *entry = calloc(1, sizeof *entry);
    REQUIRE(entry);
    entry->each = count_aside;
    newest++;
    jobs[newest] = 1;
    atomic_store(&adding, newest);
    dray__journal_add(journal, entry);
    add(1);
    wait_for(newest);
    assert_int_equal(read_aside, 0);
    held = false;
    int64_t deadline = dray__deadline(30 * DRAY__SECOND);
    while (atomic_load(&read_aside) < 300 && dray__now() < deadline)
        usleep(1000);
    assert_int_equal(read_aside, 300);
    stop();
}

/* ---- files that cannot be read --------------------------------------------------------------- */

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* they need the addresses */
enum { TOO_MUCH = 64 << 20 };

static int count_records(void *user, const dray__journal_record *record, dray_error *error)
{
    (void)record;
    (void)error;
    ++*(int *)user;
    return DRAY_OK;
}

/* In a process with so much memory left; 0: no limit. */
static int read_within(rlim_t left, int *count)
{
    uint64_t end, last;
    dray_error error;
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    REQUIRE(file && fscanf(file, "%lu", &pages) == 1 && fclose(file) == 0);
    struct rlimit limit = {pages * 4096 + left, RLIM_INFINITY};
    REQUIRE(!left || setrlimit(RLIMIT_AS, &limit) == 0);
    return dray__journal_read(path, count_records, count, &end, &last, &error);
}

/* A record for which there is no memory is none that is torn: nothing may be cut off there. */
TEST_WITHIN(test_no_memory, NULL, end_of_test)
{
    dray__journal_options o = {.path = path, .sync = true, .fetch = fetch};
    (void)state;
    assert_int_equal(dray__journal_start(&o, 0, 0, &journal, NULL), 0);
    for (int i = 0; i < 2; i++) {
        dray__journal_entry *entry = calloc(1, sizeof *entry);
        REQUIRE(entry && (entry->pieces = calloc(1, sizeof *entry->pieces)));
        entry->kind = 1;
        entry->pieces[0] = (dray__journal_piece){1, 0, i ? 8 : TOO_MUCH, 0};
        entry->piece_count = 1;
        newest++;
        dray__journal_add(journal, entry);
    }
    wait_for(newest);
    stop();
    for (int limited = 1; limited >= 0; limited--) {
        pid_t child = fork();
        if (!child) {
            int count = 0, rc = read_within(limited ? TOO_MUCH / 2 : 0, &count);
            _exit(rc == (limited ? DRAY_ENOMEM : DRAY_OK) && count == (limited ? 0 : 2) ? 0 : 1);
        }
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
}
#endif

FIXTURE(up)
{
    const char *tmp = getenv("TMPDIR");
    seed = test_seed();
    snprintf(folder, sizeof folder, "%.30s/dray-records-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/journal", folder);
    snprintf(image, sizeof image, "%s/image", folder);
    return 0;
}

FIXTURE(down)
{
    return rmdir(folder);
}

SUITE(up, down)
