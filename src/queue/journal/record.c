#include "queue/journal/record.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    FILE_MAGIC = 0x464A5244,
    MAGIC = 0x524A5244,
    FORMAT = 3, /* format 1 had no head; format 2 did not say who asked for a change */
    SUM_AT = 40,
    BLOCK = 512 << 10,
    START_BYTES = 8 << 20 /* bytes that the disk starts to write at once */
};

struct dray__sum {
    XXH3_state_t state;
};

/* Resets the sum. XXH3 does not reset a state whose seed is the same, so it is initialised first.
 */
static void begin_sum(XXH3_state_t *state, uint64_t salt)
{
    XXH3_INITSTATE(state);
    XXH3_64bits_reset_withSeed(state, salt);
}

uint64_t dray__record_bytes(const dray__record *record)
{
    return (DRAY__RECORD_HEAD + record->size + 7) / 8 * 8;
}

int dray__file_failed(const char *path, int errnum, const char *what, dray_error *error)
{
    bool full = errnum == ENOSPC || errnum == EDQUOT || errnum == EFBIG;
    if (full)
        return dray__fail(error, DRAY_EFULL, "journal %s: %s: %s", path, what, strerror(errnum));
    return dray__fail_errno(error, errnum, "journal %s: %s", path, what);
}

static int write_all(int fd, const void *data, size_t size, int64_t at)
{
    const uint8_t *from = data;
    while (size) {
        ssize_t n = pwrite(fd, from, size, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        from += n;
        at += n;
        size -= (size_t)n;
    }
    return 0;
}

const dray__journal_files dray__journal_real_files = {.write = write_all, .sync = fdatasync};

/* ---- heads ----------------------------------------------------------------------------------- */

const dray__fields dray__file_head_fields =
    DRAY__FIELDS(dray__file_head, DRAY__NUMBERS(dray__file_head, magic, format, salt, zero, sum));
const dray__fields dray__record_fields =
    DRAY__FIELDS(dray__record, DRAY__NUMBERS(dray__record, magic, kind, format, size, seq, safe,
                                             owner, flags, sum));

/* Encodes a struct into `room` bytes, which must be enough. */
static void put_at(uint8_t *at, size_t room, const dray__fields *of, const void *from)
{
    dray__writer w = {.data = at, .capacity = room};
    dray__put_fields(&w, of, from);
}

int dray__head_write(const dray__journal_files *files, int fd, const char *path, uint64_t *salt,
                     dray_error *error)
{
    uint8_t head[DRAY__FILE_HEAD] = {0};
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return dray__fail_errno(error, errno, "getrandom");
    random |= !random;
    dray__file_head said = {.magic = FILE_MAGIC, .format = FORMAT, .salt = random};
    put_at(head, sizeof head, &dray__file_head_fields, &said);
    said.sum = dray__hash(head, 24);
    put_at(head, sizeof head, &dray__file_head_fields, &said);
    if (files->write(fd, head, sizeof head, 0) < 0)
        return dray__file_failed(path, errno, "write", error);
    *salt = random;
    return DRAY_OK;
}

/* Checks that a file without a head is empty or zeros: its process died before it wrote. */
static int check_empty(int fd, const char *path, uint64_t file, dray_error *error)
{
    uint8_t block[1 << 16];
    for (uint64_t at = 0; at < file;) {
        size_t size = file - at < sizeof block ? (size_t)(file - at) : sizeof block;
        if (dray__read_at(fd, block, size, (off_t)at) < 0)
            return dray__fail_errno(error, errno, "journal %s", path);
        if (file > DRAY__FILE_HEAD && (block[0] || memcmp(block, block + 1, size - 1) != 0))
            return dray__fail(error, DRAY_ECHECKSUM,
                              "journal %s: its head is broken, or it is none", path);
        at += size;
    }
    return DRAY_OK;
}

int dray__head_read(int fd, const char *path, uint64_t *salt, dray_error *error)
{
    uint8_t head[DRAY__FILE_HEAD] = {0};
    struct stat st;
    *salt = 0;
    if (fstat(fd, &st) < 0)
        return dray__fail_errno(error, errno, "journal %s", path);
    uint64_t file = (uint64_t)st.st_size;
    size_t size = file < sizeof head ? (size_t)file : sizeof head;
    if (dray__read_at(fd, head, size, 0) < 0)
        return dray__fail_errno(error, errno, "journal %s", path);
    dray__reader r = dray__reader_of(head, sizeof head);
    dray__file_head found;
    dray__get_fields(&r, NULL, &dray__file_head_fields, &found);
    if (found.magic == MAGIC)
        return dray__fail(error, DRAY_EVERSION, "journal %s: format %u expected, found %u", path,
                          FORMAT, found.format >> 16);
    if (found.magic != FILE_MAGIC || found.sum != dray__hash(head, 24) || !found.salt)
        return check_empty(fd, path, file, error);
    if (found.format != FORMAT)
        return dray__fail(error, DRAY_EVERSION, "journal %s: format %u expected, found %u", path,
                          FORMAT, found.format);
    *salt = found.salt;
    return DRAY_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Returns false when there is no header. */
static bool read_header(const uint8_t *at, uint64_t room, dray__record *out)
{
    static const uint8_t magic[] = {'D', 'R', 'J', 'R'};
    if (memcmp(at, magic, sizeof magic) != 0) /* a quick test, for searches of a file */
        return false;
    dray__reader r = dray__reader_of(at, DRAY__RECORD_HEAD);
    dray__get_fields(&r, NULL, &dray__record_fields, out);
    return out->size <= room && dray__record_bytes(out) <= room;
}

int dray__record_at(int fd, const char *path, uint64_t at, uint64_t end, dray__record *out,
                    dray_error *error)
{
    uint8_t head[DRAY__RECORD_HEAD];
    if (end - at < sizeof head || dray__read_at(fd, head, sizeof head, (off_t)at) < 0 ||
        !read_header(head, end - at, out))
        return dray__fail(error, DRAY_EFORMAT, "journal %s: no record at byte %llu", path,
                          (unsigned long long)at);
    return DRAY_OK;
}

/* Reads the complete and correct record at `at` into *data, which the caller frees. *data is NULL
 * when there is no such record. A failed read is an error. */
static int read_record(int fd, const char *path, uint64_t salt, uint64_t at, uint64_t file,
                       dray__record *h, uint8_t **data, dray_error *error)
{
    uint8_t head[DRAY__RECORD_HEAD];
    *data = NULL;
    if (file - at < sizeof head)
        return DRAY_OK;
    if (dray__read_at(fd, head, sizeof head, (off_t)at) < 0)
        return dray__fail_errno(error, errno, "journal %s: read", path);
    if (!read_header(head, file - at, h))
        return DRAY_OK;
    uint8_t *bytes = malloc(DRAY__RECORD_HEAD + h->size);
    if (!bytes)
        return dray__nomem(error);
    if (dray__read_at(fd, bytes, DRAY__RECORD_HEAD + h->size, (off_t)at) < 0) {
        int code = errno;
        free(bytes);
        return dray__fail_errno(error, code, "journal %s: read", path);
    }
    XXH3_state_t state;
    memset(bytes + SUM_AT, 0, 8);
    begin_sum(&state, salt);
    XXH3_64bits_update(&state, bytes + DRAY__RECORD_HEAD, h->size);
    XXH3_64bits_update(&state, bytes, DRAY__RECORD_HEAD);
    if (XXH3_64bits_digest(&state) == h->sum)
        *data = bytes;
    else
        free(bytes);
    return DRAY_OK;
}

/* Finds the next whole record from `at` on that has a number above `last`, or with `safe` one that
 * says that a number above `last` had been safe. *found is `file` when there is none. */
static int find_record(int fd, const char *path, uint64_t salt, uint64_t at, uint64_t file,
                       uint64_t last, bool safe, uint64_t *found, dray_error *error)
{
    uint8_t block[1 << 16];
    *found = file;
    for (uint64_t from = (at + 8) / 8 * 8; file - from >= DRAY__RECORD_HEAD && from < file;) {
        size_t size = file - from < sizeof block ? (size_t)(file - from) : sizeof block;
        if (dray__read_at(fd, block, size, (off_t)from) < 0)
            return dray__fail_errno(error, errno, "journal %s: read", path);
        for (size_t i = 0; i + DRAY__RECORD_HEAD <= size; i += 8) {
            dray__record h;
            uint8_t *data = NULL;
            if (!read_header(block + i, file - from - i, &h) || (safe ? h.safe : h.seq) <= last)
                continue;
            int rc = read_record(fd, path, salt, from + i, file, &h, &data, error);
            if (rc)
                return rc;
            if (!data)
                continue;
            free(data);
            *found = from + i;
            return DRAY_OK;
        }
        from += size > DRAY__RECORD_HEAD ? (size - DRAY__RECORD_HEAD) / 8 * 8 + 8 : size;
    }
    return DRAY_OK;
}

static int fail_broken(const char *path, uint64_t at, dray_error *error)
{
    return dray__fail(error, DRAY_ECHECKSUM,
                      "journal %s: the record at byte %llu is broken, and it had been safe", path,
                      (unsigned long long)at);
}

/* Fails when a later record says that the record after number `last`, which is broken, had been
 * safe. */
static int check_not_safe(int fd, const char *path, uint64_t salt, uint64_t at, uint64_t file,
                          uint64_t last, dray_error *error)
{
    uint64_t found;
    int rc = find_record(fd, path, salt, at, file, last, true, &found, error);
    return rc || found == file ? rc : fail_broken(path, at, error);
}

/* Calls `each` for the records from *at on, up to the first one that is not whole. */
static int read_records(int fd, const char *path, uint64_t salt, uint64_t file,
                        dray__journal_each each, void *user, uint64_t *at, uint64_t *last,
                        dray_error *error)
{
    int rc = DRAY_OK;
    while (!rc) {
        dray__record h;
        uint8_t *data = NULL;
        rc = read_record(fd, path, salt, *at, file, &h, &data, error);
        if (rc || !data)
            break;
        if (h.format != FORMAT)
            rc = dray__fail(error, DRAY_EVERSION, "journal %s: format %u expected, found %u", path,
                            FORMAT, h.format);
        else if (h.seq <= *last || h.seq >= INT64_MAX)
            rc = dray__fail(error, DRAY_EFORMAT,
                            "journal %s, at byte %llu: a record after number %llu expected, found "
                            "%llu",
                            path, (unsigned long long)*at, (unsigned long long)*last,
                            (unsigned long long)h.seq);
        dray__journal_record record = {.kind = h.kind,
                                       .owner = h.owner,
                                       .seq = h.seq,
                                       .at = *at,
                                       .bytes = dray__record_bytes(&h),
                                       .body = data + DRAY__RECORD_HEAD,
                                       .size = h.size,
                                       .missing = h.flags & DRAY__RECORD_MISSING};
        if (!rc)
            rc = each(user, &record, error);
        free(data);
        if (!rc) {
            *last = h.seq;
            *at += record.bytes;
        }
    }
    return rc;
}

int dray__records_read(int fd, const char *path, uint64_t salt, uint64_t file,
                       dray__journal_each each, void *user, uint64_t *end, uint64_t *last,
                       dray_error *error)
{
    uint64_t at = DRAY__FILE_HEAD;
    *last = 0;
    int rc = read_records(fd, path, salt, file, each, user, &at, last, error);
    *end = at;
    dray__record torn;
    if (!rc && dray__record_at(fd, path, at, UINT64_MAX, &torn, NULL) == DRAY_OK &&
        torn.seq > *last)
        dray__log(DRAY_LOG_WARN, "queue: journal %s: record %llu, at byte %llu, is not whole", path,
                  (unsigned long long)torn.seq, (unsigned long long)at);
    return rc || at >= file ? rc : check_not_safe(fd, path, salt, at, file, *last, error);
}

int dray__records_read_whole(int fd, const char *path, uint64_t salt, uint64_t file,
                             dray__journal_each each, void *user, dray_error *error)
{
    uint64_t at = DRAY__FILE_HEAD, last = 0, broken = 0;
    int rc = read_records(fd, path, salt, file, each, user, &at, &last, error);
    while (!rc && at < file) {
        broken = broken ? broken : at;
        rc = find_record(fd, path, salt, at, file, last, false, &at, error);
        if (!rc && at < file)
            rc = read_records(fd, path, salt, file, each, user, &at, &last, error);
    }
    return rc || !broken ? rc : fail_broken(path, broken, error);
}

int dray__journal_read_open(int fd, const char *label, dray__journal_each each, void *user,
                            uint64_t *end, uint64_t *last, dray_error *error)
{
    uint64_t salt;
    struct stat st;
    *end = *last = 0;
    int rc = fstat(fd, &st) < 0 ? dray__fail_errno(error, errno, "journal %s", label)
                                : dray__head_read(fd, label, &salt, error);
    if (!rc && salt)
        rc =
            dray__records_read(fd, label, salt, (uint64_t)st.st_size, each, user, end, last, error);
    return rc;
}

int dray__journal_read(const char *path, dray__journal_each each, void *user, uint64_t *end,
                       uint64_t *last, dray_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return dray__fail_errno(error, errno, "journal %s", path);
    int rc = dray__journal_read_open(fd, path, each, user, end, last, error);
    close(fd);
    return rc;
}

/* ---- writing --------------------------------------------------------------------------------- */

int dray__output_init(dray__output *out, const dray__journal_files *files, dray_error *error)
{
    void *sum = NULL; /* its type must be aligned to 64 bytes */
    *out = (dray__output){.files = files, .fd = -1, .block = malloc(BLOCK)};
    if (posix_memalign(&sum, 64, sizeof *out->sum) == 0)
        out->sum = sum;
    if (out->block && out->sum)
        return DRAY_OK;
    dray__output_free(out);
    return dray__nomem(error);
}

void dray__output_free(dray__output *out)
{
    free(out->block);
    free(out->sum);
    *out = (dray__output){.fd = -1};
}

void dray__output_to(dray__output *out, int fd, const char *path, uint64_t salt, uint64_t at)
{
    out->fd = fd;
    out->path = path;
    out->salt = salt;
    out->at = out->started = at;
    out->used = out->summed = 0;
    out->in_record = false;
}

uint64_t dray__output_end(const dray__output *out)
{
    return out->at + out->used;
}

static void add_to_sum(dray__output *out)
{
    if (out->in_record)
        XXH3_64bits_update(&out->sum->state, out->block + out->summed, out->used - out->summed);
    out->summed = out->used;
}

/* Starts the writeback of large records early, so that the disk writes while the next bytes are
 * fetched. */
int dray__output_flush(dray__output *out, dray_error *error)
{
    add_to_sum(out);
    if (out->used && out->files->write(out->fd, out->block, out->used, (int64_t)out->at) < 0)
        return dray__file_failed(out->path, errno, "write", error);
    out->at += out->used;
    out->used = out->summed = 0;
    if (out->at - out->started < START_BYTES)
        return DRAY_OK;
    sync_file_range(out->fd, (off_t)out->started, (off_t)(out->at - out->started),
                    SYNC_FILE_RANGE_WRITE); /* if that fails, fdatasync returns the reason */
    out->started = out->at;
    return DRAY_OK;
}

/* Finds room in the block: at least one byte, at most `wanted`. */
static int find_room(dray__output *out, uint64_t wanted, size_t *room, dray_error *error)
{
    int rc = out->used == BLOCK ? dray__output_flush(out, error) : DRAY_OK;
    *room = BLOCK - out->used;
    if (*room > wanted)
        *room = (size_t)wanted;
    return rc;
}

static int put(dray__output *out, const void *data, uint64_t size, dray_error *error)
{
    int rc = DRAY_OK;
    size_t room;
    for (uint64_t done = 0; done < size && !rc; done += room) {
        rc = find_room(out, size - done, &room, error);
        if (rc)
            return rc;
        memcpy(out->block + out->used, (const uint8_t *)data + done, room);
        out->used += room;
    }
    return rc;
}

static int put_piece(dray__output *out, const dray__journal_piece *piece,
                     const dray__journal_options *from, bool *missing, dray_error *error)
{
    size_t room;
    for (uint64_t done = 0; done < piece->bytes; done += room) {
        int rc = find_room(out, piece->bytes - done, &room, error);
        if (rc)
            return rc;
        dray__journal_piece part = {piece->source, piece->offset + done, room, piece->keeper};
        uint8_t *at = out->block + out->used;
        rc = *missing ? DRAY_EGONE : from->fetch(from->user, &part, at, error);
        if (rc && rc != DRAY_EGONE)
            return rc;
        if (rc) {
            memset(at, 0, room);
            *error = (dray_error){0};
        }
        *missing |= rc != DRAY_OK;
        out->used += room;
    }
    return DRAY_OK;
}

/* Begins a record: leaves room for its header, which is filled in at the end. */
static int begin(dray__output *out, uint64_t *header, dray_error *error)
{
    int rc = BLOCK - out->used < DRAY__RECORD_HEAD ? dray__output_flush(out, error) : DRAY_OK;
    if (rc)
        return rc;
    *header = dray__output_end(out);
    memset(out->block + out->used, 0, DRAY__RECORD_HEAD);
    out->used += DRAY__RECORD_HEAD;
    out->summed = out->used;
    out->in_record = true;
    begin_sum(&out->sum->state, out->salt);
    return DRAY_OK;
}

static int end(dray__output *out, uint64_t header, const dray__record *record, dray_error *error)
{
    static const uint8_t zeros[8];
    uint8_t head[DRAY__RECORD_HEAD];
    dray__record said = *record;
    said.magic = MAGIC;
    said.format = FORMAT;
    said.sum = 0;
    put_at(head, sizeof head, &dray__record_fields, &said);
    add_to_sum(out);
    out->in_record = false;
    XXH3_64bits_update(&out->sum->state, head, sizeof head);
    said.sum = XXH3_64bits_digest(&out->sum->state);
    put_at(head, sizeof head, &dray__record_fields, &said);
    int rc = put(out, zeros, dray__record_bytes(record) - DRAY__RECORD_HEAD - record->size, error);
    if (rc)
        return rc;
    if (header >= out->at)
        memcpy(out->block + (header - out->at), head, sizeof head);
    else if (out->files->write(out->fd, head, sizeof head, (int64_t)header) < 0)
        return dray__file_failed(out->path, errno, "write", error);
    return DRAY_OK;
}

int dray__output_entry(dray__output *out, dray__journal_entry *entry, uint64_t safe,
                       const dray__journal_options *from, dray_error *error)
{
    dray__record record = {.kind = entry->kind,
                           .owner = entry->owner,
                           .size = entry->body.size,
                           .seq = entry->seq,
                           .safe = safe};
    uint64_t header = 0;
    entry->missing = false;
    for (uint32_t i = 0; i < entry->piece_count; i++)
        record.size += entry->pieces[i].bytes;
    int rc = begin(out, &header, error);
    if (!rc)
        rc = put(out, entry->body.data, entry->body.size, error);
    for (uint32_t i = 0; i < entry->piece_count && !rc; i++)
        rc = put_piece(out, &entry->pieces[i], from, &entry->missing, error);
    record.flags = entry->missing ? DRAY__RECORD_MISSING : 0;
    return rc ? rc : end(out, header, &record, error);
}

int dray__output_copy(dray__output *out, int from, const char *path, uint64_t salt, uint64_t at,
                      const dray__record *record, dray_error *error)
{
    uint64_t header = 0;
    uint8_t head[DRAY__RECORD_HEAD];
    XXH3_state_t before; /* under the other file's salt */
    int rc = begin(out, &header, error);
    if (!rc && dray__read_at(from, head, sizeof head, (off_t)at) < 0)
        rc = dray__fail_errno(error, errno, "journal %s", path);
    begin_sum(&before, salt);
    size_t room;
    for (uint64_t done = 0; done < record->size && !rc; done += room) {
        rc = find_room(out, record->size - done, &room, error);
        if (rc)
            return rc;
        uint8_t *to = out->block + out->used;
        if (dray__read_at(from, to, room, (off_t)(at + DRAY__RECORD_HEAD + done)) < 0)
            return dray__fail_errno(error, errno, "journal %s", path);
        XXH3_64bits_update(&before, to, room);
        out->used += room;
    }
    if (rc)
        return rc;
    memset(head + SUM_AT, 0, 8);
    XXH3_64bits_update(&before, head, sizeof head);
    if (XXH3_64bits_digest(&before) != record->sum)
        return dray__fail(error, DRAY_ECHECKSUM, "journal %s: the record at byte %llu is broken",
                          path, (unsigned long long)at);
    return end(out, header, record, error);
}
