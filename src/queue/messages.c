#include "queue/messages.h"

#include "base/error.h"
#include "control/protocol.h"
#include "queue/policies.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- policies -------------------------------------------------------------------------------- */

unsigned dray__policy_traits(int32_t policy)
{
#define XX(number, name, pick, traits, refused) [DRAY_POLICY_##number] = (traits),
    static const unsigned char all[] = {DRAY__POLICY_MAP(XX)};
#undef XX
    return policy >= 0 && (size_t)policy < sizeof all ? all[policy] : 0;
}

/* ---- columns and their places ---------------------------------------------------------------- */

const dray__fields dray__spec_fields =
    DRAY__FIELDS(dray__column_spec, DRAY__NUMBERS(dray__column_spec, dtype, content, ndim, ragged),
                 DRAY__FIELD_ARRAY(dray__column_spec, shape));
const dray__fields dray__extent_fields =
    DRAY__FIELDS(dray__extent, DRAY__NUMBERS(dray__extent, chunk, values, bytes, offsets));

int dray__name_check(const char *name, const char *what, dray_error *error)
{
    size_t length = name ? strlen(name) : 0;
    if (!length || length > DRAY__WORD_MAX || !dray__utf8_plain(name, length))
        return dray__fail(error, DRAY_EINVALID,
                          "%s: a name is 1 to %u bytes of UTF-8 without control characters, found "
                          "%zu%s",
                          what, DRAY__WORD_MAX, length,
                          length && dray__utf8_valid(name, length) && length <= DRAY__WORD_MAX
                              ? ", and a control character"
                              : "");
    return DRAY_OK;
}

int dray__spec_check(const dray__column_spec *spec, const char *name, dray_error *error)
{
    if (!dray_dtype_size((dray_dtype)spec->dtype))
        return dray__fail(error, DRAY_EDTYPE, "column %s: unknown dtype %d", name, spec->dtype);
    if (spec->ndim > DRAY_MAX_DIMS)
        return dray__fail(error, DRAY_ESHAPE, "column %s: %u dimensions, at most %d", name,
                          spec->ndim, DRAY_MAX_DIMS);
    if (spec->ragged && spec->ndim == 0)
        return dray__fail(error, DRAY_ESHAPE, "column %s: ragged needs a dimension, found none",
                          name);
    if (spec->content < DRAY_CONTENT_TENSOR || spec->content > DRAY_CONTENT_OBJECT)
        return dray__fail(error, DRAY_EINVALID, "column %s: unknown content %d", name,
                          spec->content);
    if (spec->content != DRAY_CONTENT_TENSOR &&
        (spec->dtype != DRAY_U8 || spec->ndim != 1 || !spec->ragged))
        return dray__fail(
            error, DRAY_EINVALID,
            "column %s: strings, bytes and objects are U8 of one ragged dimension, found %s "
            "of %u dimensions, %s",
            name, dray_dtype_name((dray_dtype)spec->dtype), spec->ndim,
            spec->ragged ? "ragged" : "fixed");
    uint64_t bytes = dray_dtype_size((dray_dtype)spec->dtype);
    for (uint32_t d = spec->ragged ? 1 : 0; d < spec->ndim; d++)
        if (spec->shape[d] < 0 || __builtin_mul_overflow(bytes, (uint64_t)spec->shape[d], &bytes) ||
            bytes > INT64_MAX)
            return dray__fail(error, DRAY_ESHAPE,
                              "column %s: impossible extent %lld of dimension "
                              "%u",
                              name, (long long)spec->shape[d], d);
    return DRAY_OK;
}

int dray__spec_of(const dray_column_data *column, dray__column_spec *out, dray_error *error)
{
    int rc = dray__name_check(column->name, "column", error);
    if (rc)
        return rc;
    *out = (dray__column_spec){.dtype = column->dtype,
                               .content = column->content,
                               .ndim = column->ndim,
                               .ragged = column->offsets != NULL};
    for (uint32_t d = out->ragged ? 1 : 0; d < column->ndim && d < DRAY_MAX_DIMS; d++)
        out->shape[d] = column->shape[d];
    return dray__spec_check(out, column->name, error);
}

enum { SPEC_TEXT = 160 };

/* "F32 [?, 3]"; a ragged dimension is "?", one number a row is "[]". */
static const char *describe(const dray__column_spec *spec, char out[SPEC_TEXT])
{
    static const char *const contents[] = {"", " strings", " bytes", " objects"};
    int n = snprintf(out, SPEC_TEXT, "%s [", dray_dtype_name((dray_dtype)spec->dtype));
    if (spec->ragged)
        n += snprintf(out + n, SPEC_TEXT - (size_t)n, "?");
    for (uint32_t d = spec->ragged ? 1 : 0; d < spec->ndim; d++)
        n += snprintf(out + n, SPEC_TEXT - (size_t)n, "%s%lld", d ? ", " : "",
                      (long long)spec->shape[d]);
    snprintf(out + n, SPEC_TEXT - (size_t)n, "]%s", contents[spec->content]);
    return out;
}

int dray__spec_same(const dray__column_spec *column, const dray__column_spec *found,
                    const char *name, dray_error *error)
{
    char was[SPEC_TEXT], is[SPEC_TEXT];
    bool same = column->dtype == found->dtype && column->content == found->content;
    int code = same ? DRAY_ESHAPE : DRAY_EDTYPE;
    same &= column->ndim == found->ndim && column->ragged == found->ragged;
    for (uint32_t d = 0; same && d < column->ndim; d++)
        same = column->shape[d] == found->shape[d];
    return same ? DRAY_OK
                : dray__fail(error, code, "column %s: rows of %s expected, found %s", name,
                             describe(column, was), describe(found, is));
}

uint64_t dray__spec_elements(const dray__column_spec *spec)
{
    uint64_t elements = 1;
    for (uint32_t d = spec->ragged ? 1 : 0; d < spec->ndim; d++)
        elements *= (uint64_t)spec->shape[d];
    return elements;
}

uint64_t dray__spec_bytes(const dray__column_spec *spec)
{
    return dray__spec_elements(spec) * dray_dtype_size((dray_dtype)spec->dtype);
}

int dray__extent_check(const dray__extent *e, const dray__column_spec *spec, uint64_t items,
                       uint64_t size, const char *name, dray_error *error)
{
    uint64_t end, need;
    if (__builtin_add_overflow(e->values, e->bytes, &end) || end > size || e->values % DRAY__ALIGN)
        return dray__fail(error, DRAY_EFORMAT,
                          "column %s: %llu bytes at %llu do not lie (aligned to %u) within a chunk "
                          "of %llu bytes",
                          name, (unsigned long long)e->bytes, (unsigned long long)e->values,
                          DRAY__ALIGN, (unsigned long long)size);
    if (!spec->ragged) {
        if (e->offsets || __builtin_mul_overflow(items, dray__spec_bytes(spec), &need) ||
            need != e->bytes)
            return dray__fail(error, DRAY_EFORMAT,
                              "column %s: %llu items of %llu bytes, found %llu bytes", name,
                              (unsigned long long)items, (unsigned long long)dray__spec_bytes(spec),
                              (unsigned long long)e->bytes);
        return DRAY_OK;
    }
    if (__builtin_mul_overflow(items + 1, (uint64_t)8, &need) ||
        __builtin_add_overflow(e->offsets, need, &end) || end > size || e->offsets % DRAY__ALIGN)
        return dray__fail(error, DRAY_EFORMAT,
                          "column %s: %llu offsets at %llu do not lie within a chunk of %llu bytes",
                          name, (unsigned long long)items + 1, (unsigned long long)e->offsets,
                          (unsigned long long)size);
    return DRAY_OK;
}

uint64_t dray__extent_bytes(const dray__extent *extent, const dray__column_spec *spec,
                            uint64_t items)
{
    return extent->bytes + (spec->ragged ? (items + 1) * 8 : 0);
}

/* ---- parts of several messages and records --------------------------------------------------- */

static const dray__fields column_fields =
    DRAY__FIELDS(dray__new_column, DRAY__FIELD_TEXT(dray__new_column, name, DRAY__WORD_MAX),
                 DRAY__FIELD_STRUCT(dray__new_column, spec, dray__spec_fields),
                 DRAY__FIELD_STRUCT(dray__new_column, extent, dray__extent_fields));
const dray__fields dray__tag_fields =
    DRAY__FIELDS(dray__new_tag, DRAY__NUMBERS(dray__new_tag, item, key, value));
const dray__fields dray__content_fields = DRAY__FIELDS(
    dray__content, DRAY__FIELD_LIST(dray__content, columns, column_count, column_fields),
    DRAY__FIELD_LIST(dray__content, keys, key_count, dray__name_fields),
    DRAY__FIELD_LIST(dray__content, tags, tag_count, dray__tag_fields));
const dray__fields dray__task_fields =
    DRAY__FIELDS(dray__task_names, DRAY__FIELD_TEXT(dray__task_names, name, DRAY__WORD_MAX),
                 DRAY__FIELD_LIST(dray__task_names, needs, needs_count, dray__name_fields),
                 DRAY__FIELD_LIST(dray__task_names, writes, writes_count, dray__name_fields));
const dray__fields dray__settings_fields = DRAY__FIELDS(
    dray__settings,
    DRAY__NUMBERS(dray__settings, capacity_rows, capacity_bytes, max_attempts, on_loss, provisional,
                  batch_rows, open_batches, checkpoint_batches, row_bytes, durability, backend),
    DRAY__FIELD_TEXT(dray__settings, backend_address, DRAY__ADDRESS_MAX));
const dray__fields dray__admission_fields =
    DRAY__FIELDS(dray__admission, DRAY__NUMBERS(dray__admission, batch, task, staleness,
                                                concurrency, version, accepted));
const dray__fields dray__cover_fields =
    DRAY__FIELDS(dray__cursor, DRAY__NUMBERS(dray__cursor, epoch, seq));
const dray__fields dray__cursor_fields =
    DRAY__FIELDS(dray__cursor, DRAY__NUMBERS(dray__cursor, epoch, seq, version));

/* ---- requests and answers -------------------------------------------------------------------- */

const dray__fields dray__opening_fields =
    DRAY__FIELDS(dray__opening, DRAY__FIELD_TEXT(dray__opening, name, DRAY__WORD_MAX),
                 DRAY__FIELD_LIST(dray__opening, tasks, task_count, dray__task_fields),
                 DRAY__FIELD_STRUCT(dray__opening, settings, dray__settings_fields),
                 DRAY__NUMBERS(dray__opening, identity),
                 DRAY__FIELD_TEXT(dray__opening, restore, DRAY__ADDRESS_MAX),
                 DRAY__NUMBERS(dray__opening, timeout_ns));
const dray__fields dray__welcome_fields = DRAY__FIELDS(
    dray__welcome, DRAY__NUMBERS(dray__welcome, client, durability, era, paged, backend),
    DRAY__FIELD_TEXT(dray__welcome, address, DRAY__ADDRESS_MAX),
    DRAY__NUMBERS(dray__welcome, space, capacity_bytes),
    DRAY__FIELD_LIST(dray__welcome, tasks, task_count, dray__task_fields));
const dray__fields dray__insert_fields =
    DRAY__FIELDS(dray__new_rows, DRAY__FIELD_TEXT(dray__new_rows, partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__new_rows, rows, group_size, per_group, at_slot, row_bytes,
                               refill, ticket, timeout_ns),
                 DRAY__FIELD_STRUCT(dray__new_rows, content, dray__content_fields));
const dray__fields dray__room_fields =
    DRAY__FIELDS(dray__new_rows, DRAY__FIELD_TEXT(dray__new_rows, partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__new_rows, rows, group_size, at_slot, row_bytes, ticket, values,
                               bytes, timeout_ns));
const dray__fields dray__sealing_fields =
    DRAY__FIELDS(dray__sealing, DRAY__FIELD_TEXT(dray__sealing, partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__sealing, rows));
const dray__fields dray__awaited_fields =
    DRAY__FIELDS(dray__awaited, DRAY__FIELD_TEXT(dray__awaited, partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__awaited, task, timeout_ns));
const dray__fields dray__refilling_fields =
    DRAY__FIELDS(dray__refilling, DRAY__NUMBERS(dray__refilling, id),
                 DRAY__FIELD_TEXT(dray__refilling, partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__refilling, rows, slot, group, task, attempts, cause),
                 DRAY__FIELD_PROSE(dray__refilling, reason, DRAY__WORD_MAX));
const dray__fields dray__admitting_fields = DRAY__FIELDS(
    dray__admitting, DRAY__FIELD_STRUCT(dray__admitting, admission, dray__admission_fields),
    DRAY__NUMBERS(dray__admitting, resume));
static const dray__fields choice_fields =
    DRAY__FIELDS(dray__choice, DRAY__NUMBERS(dray__choice, want.task),
                 DRAY__FIELD_TEXT(dray__choice, want.partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__choice, want.count, want.up_to, want.policy, hold_ns,
                               want.fresh, want.staleness, want.version),
                 DRAY__FIELD_GUARD(dray__choice, ranked),
                 DRAY__FIELD_TEXT(dray__choice, want.group, DRAY__WORD_MAX),
                 DRAY__FIELD_TEXT(dray__choice, want.cost, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__choice, want.group_epoch, want.round, want.token_cap,
                               want.dp_rank, want.dp_size, want.peer, want.peers, want.micro_rows));
const dray__fields dray__claiming_fields = DRAY__FIELDS(
    dray__claiming, DRAY__NUMBERS(dray__claiming, ticket, columns_known, keys_known, timeout_ns),
    DRAY__FIELD_LIST(dray__claiming, choices, count, choice_fields));
const dray__fields dray__committing_fields = DRAY__FIELDS(
    dray__committing, DRAY__NUMBERS(dray__committing, ticket, generation),
    DRAY__FIELD_STRUCT(dray__committing, outputs.content, dray__content_fields),
    DRAY__FIELD_LIST(dray__committing, outputs.open, outputs.open_count, dray__u32_fields));
const dray__fields dray__failing_fields =
    DRAY__FIELDS(dray__failing, DRAY__NUMBERS(dray__failing, ticket),
                 DRAY__FIELD_LIST(dray__failing, items, count, dray__u32_fields),
                 DRAY__FIELD_PROSE(dray__failing, reason, DRAY__LINES_MAX));
const dray__fields dray__losing_fields =
    DRAY__FIELDS(dray__failing, DRAY__NUMBERS(dray__failing, ticket),
                 DRAY__FIELD_LIST(dray__failing, items, count, dray__u32_fields),
                 DRAY__FIELD_PROSE(dray__failing, reason, DRAY__LINES_MAX),
                 DRAY__FIELD_LIST(dray__failing, chunks, chunk_count, dray__u64_fields));
const dray__fields dray__splitting_fields =
    DRAY__FIELDS(dray__splitting, DRAY__NUMBERS(dray__splitting, ticket, part),
                 DRAY__FIELD_LIST(dray__splitting, items, count, dray__u32_fields));
const dray__fields dray__holding_fields =
    DRAY__FIELDS(dray__holding, DRAY__NUMBERS(dray__holding, ticket, hold_ns));
static const dray__fields wish_fields =
    DRAY__FIELDS(dray__chunk_wish, DRAY__NUMBERS(dray__chunk_wish, id, key, size, least));
const dray__fields dray__storing_fields =
    DRAY__FIELDS(dray__storing, DRAY__NUMBERS(dray__storing, keeper),
                 DRAY__FIELD_LIST(dray__storing, wishes, wish_count, wish_fields),
                 DRAY__FIELD_LIST(dray__storing, given_up, given_up_count, dray__u64_fields));
const dray__fields dray__saving_fields =
    DRAY__FIELDS(dray__saving, DRAY__FIELD_TEXT(dray__saving, name, DRAY__LINES_MAX));
const dray__fields dray__stored_fields =
    DRAY__FIELDS(dray__stored, DRAY__NUMBERS(dray__stored, given, size));
const dray__fields dray__known_column_fields =
    DRAY__FIELDS(dray__known_column, DRAY__NUMBERS(dray__known_column, index),
                 DRAY__FIELD_TEXT(dray__known_column, name, DRAY__WORD_MAX),
                 DRAY__FIELD_STRUCT(dray__known_column, spec, dray__spec_fields));
const dray__fields dray__news_fields = DRAY__FIELDS(
    dray__news, DRAY__FIELD_LIST(dray__news, columns, column_count, dray__known_column_fields),
    DRAY__FIELD_LIST(dray__news, keys, key_count, dray__name_fields));

/* ---- rows with keys -------------------------------------------------------------------------- */

const dray__fields dray__row_at_fields =
    DRAY__FIELDS(dray__row_at, DRAY__NUMBERS(dray__row_at, slot, generation, version));
const dray__fields dray__named_fields =
    DRAY__FIELDS(dray__named, DRAY__FIELD_LIST(dray__named, keys, key_count, dray__name_fields),
                 DRAY__FIELD_LIST(dray__named, at, at_count, dray__row_at_fields));
const dray__fields dray__note_fields = DRAY__FIELDS(dray__note, DRAY__NUMBERS(dray__note, given),
                                                    DRAY__FIELD_BLOB(dray__note, data, size));
const dray__fields dray__putting_fields =
    DRAY__FIELDS(dray__putting, DRAY__FIELD_TEXT(dray__putting, partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__putting, rows, ticket),
                 DRAY__FIELD_STRUCT(dray__putting, named, dray__named_fields),
                 DRAY__FIELD_LIST(dray__putting, notes, note_count, dray__note_fields),
                 DRAY__FIELD_LIST(dray__putting, columns, column_count, column_fields));
const dray__fields dray__getting_fields =
    DRAY__FIELDS(dray__getting, DRAY__FIELD_TEXT(dray__getting, partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__getting, ticket),
                 DRAY__FIELD_STRUCT(dray__getting, named, dray__named_fields),
                 DRAY__FIELD_LIST(dray__getting, columns, column_count, dray__name_fields),
                 DRAY__NUMBERS(dray__getting, all_columns, partial, up_to),
                 DRAY__FIELD_TEXT(dray__getting, task, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__getting, count, timeout_ns));
const dray__fields dray__got_row_fields =
    DRAY__FIELDS(dray__got_row, DRAY__FIELD_STRUCT(dray__got_row, at, dray__row_at_fields),
                 DRAY__FIELD_TEXT(dray__got_row, key, DRAY__WORD_MAX),
                 DRAY__FIELD_STRUCT(dray__got_row, note, dray__note_fields));
static const dray__fields got_column_fields =
    DRAY__FIELDS(dray__got_column, DRAY__NUMBERS(dray__got_column, column, keeper),
                 DRAY__FIELD_STRUCT(dray__got_column, extent, dray__extent_fields),
                 DRAY__FIELD_STRUCT(dray__got_column, spec, dray__spec_fields));
static const dray__fields got_put_fields =
    DRAY__FIELDS(dray__got_put, DRAY__NUMBERS(dray__got_put, items),
                 DRAY__FIELD_LIST(dray__got_put, columns, column_count, got_column_fields));
static const dray__fields got_cell_fields =
    DRAY__FIELDS(dray__got_cell, DRAY__NUMBERS(dray__got_cell, put, item));
const dray__fields dray__got_fields = DRAY__FIELDS(
    dray__got, DRAY__FIELD_LIST(dray__got, rows, row_count, dray__got_row_fields),
    DRAY__FIELD_LIST(dray__got, puts, put_count, got_put_fields),
    DRAY__FIELD_LIST(dray__got, columns, column_count, dray__name_fields),
    DRAY__FIELD_LIST(dray__got, cells, cell_count, got_cell_fields), DRAY__FIELD(dray__got, roomy));
const dray__fields dray__dropping_fields =
    DRAY__FIELDS(dray__dropping, DRAY__FIELD_TEXT(dray__dropping, partition, DRAY__WORD_MAX),
                 DRAY__FIELD_STRUCT(dray__dropping, named, dray__named_fields));
const dray__fields dray__resetting_fields =
    DRAY__FIELDS(dray__resetting, DRAY__FIELD_TEXT(dray__resetting, partition, DRAY__WORD_MAX),
                 DRAY__FIELD_TEXT(dray__resetting, task, DRAY__WORD_MAX));

static const dray__fields chunk_key_fields =
    DRAY__FIELDS(dray__chunk_key, DRAY__NUMBERS(dray__chunk_key, id, key));
const dray__fields dray__chunk_keys_fields = DRAY__FIELDS(
    dray__chunk_keys, DRAY__FIELD_LIST(dray__chunk_keys, items, count, chunk_key_fields));
const dray__fields dray__keeping_fields =
    DRAY__FIELDS(dray__keeping, DRAY__NUMBERS(dray__keeping, id, key, bytes, era));
const dray__fields dray__keeper_join_fields =
    DRAY__FIELDS(dray__keeper_join, DRAY__FIELD_TEXT(dray__keeper_join, path, DRAY__LINES_MAX),
                 DRAY__FIELD_TEXT(dray__keeper_join, endpoint, DRAY__LINES_MAX),
                 DRAY__NUMBERS(dray__keeper_join, own));
const dray__fields dray__keeper_wait_fields =
    DRAY__FIELDS(dray__keeper_wait, DRAY__NUMBERS(dray__keeper_wait, number, seen, timeout_ns));
#define KEEPER_KEY                                                                                 \
    DRAY__FIELD_TEXT(dray__keeper_told, identity, DRAY__WORD_MAX),                                 \
        DRAY__FIELD_BLOB(dray__keeper_told, key, key_size)
const dray__fields dray__keeper_joined_fields =
    DRAY__FIELDS(dray__keeper_told, DRAY__NUMBERS(dray__keeper_told, number), KEEPER_KEY,
                 DRAY__NUMBERS(dray__keeper_told, era));
const dray__fields dray__keeper_found_fields =
    DRAY__FIELDS(dray__keeper_told, DRAY__NUMBERS(dray__keeper_told, number),
                 DRAY__FIELD_TEXT(dray__keeper_told, path, DRAY__LINES_MAX),
                 DRAY__FIELD_TEXT(dray__keeper_told, endpoint, DRAY__LINES_MAX), KEEPER_KEY);

bool dray__counts_once(uint16_t type)
{
    static const uint16_t types[] = {
        DRAY__MSG_QUEUE_SEAL,    DRAY__MSG_QUEUE_CLEAR,  DRAY__MSG_QUEUE_DECLINE,
        DRAY__MSG_QUEUE_COVER,   DRAY__MSG_QUEUE_RESUME, DRAY__MSG_QUEUE_ADMIT,
        DRAY__MSG_QUEUE_VERSION, DRAY__MSG_QUEUE_DROP,   DRAY__MSG_QUEUE_RESET};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i] == type)
            return true;
    return false;
}

int dray__keeper_key(const dray__keeper_told *told, const char *what, dray__tls_key *out,
                     dray_error *error)
{
    if (told->key_size != sizeof out->bytes || strlen(told->identity) >= sizeof out->identity)
        return dray__fail(error, DRAY_EPROTO, "%s: a key of %zu bytes", what, told->key_size);
    strcpy(out->identity, told->identity);
    memcpy(out->bytes, told->key, told->key_size);
    return DRAY_OK;
}

int dray__saved_name_check(const char *name, dray_error *error)
{
    enum { LONGEST = 200 };
    size_t length = strlen(name);
    if (!length || length > LONGEST || name[0] == '.' || strchr(name, '/') ||
        !dray__utf8_plain(name, length))
        return dray__fail(
            error, DRAY_EINVALID,
            "checkpoint '%.256s': a name of 1 to %d bytes expected, without '/', that "
            "does not begin with '.'",
            name, LONGEST);
    return DRAY_OK;
}

int dray__opening_read(dray__reader *r, dray__arena *arena, dray__opening *out, dray_error *error)
{
    dray__get_fields(r, arena, &dray__opening_fields, out);
    int rc = dray__reader_finish(r, "QUEUE_OPEN", error);
    if (!rc && (out->settings.durability < 0 || out->settings.durability > DRAY_DURABILITY_JOURNAL))
        rc = dray__fail(error, DRAY_EINVALID, "queue %s: durability %d is none", out->name,
                        out->settings.durability);
    return rc;
}

/* ---- releases -------------------------------------------------------------------------------- */

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW }; /* else a client could make the controller fault */

static dray__releases *map(int fd)
{
    void *at = mmap(NULL, sizeof(dray__releases), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

dray__releases *dray__releases_new(int *fd)
{
    dray__releases *page = NULL;
    int memory = memfd_create("dray-releases", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0)
        return NULL;
    if (ftruncate(memory, sizeof *page) == 0 && fcntl(memory, F_ADD_SEALS, SEALS) == 0)
        page = map(memory);
    if (page)
        *fd = memory;
    else
        close(memory);
    return page;
}

dray__releases *dray__releases_map(int fd)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &st) < 0 ||
        st.st_size != (off_t)sizeof(dray__releases))
        return NULL;
    return map(fd);
}

void dray__releases_free(dray__releases *page)
{
    if (page)
        munmap(page, sizeof *page);
}

/* The client writes a ticket and then reads `wanted`. The controller writes `wanted` and then reads
 * tickets. These four accesses have one total order (SEQ_CST), so at least one side sees the
 * other's write. */

bool dray__releases_write(dray__releases *page, uint32_t ticket, uint32_t frees)
{
    if (!page || __atomic_load_n(&page->wanted, __ATOMIC_RELAXED) & frees)
        return false;
    uint32_t written = page->written;
    if (written - __atomic_load_n(&page->read, __ATOMIC_ACQUIRE) >= DRAY__RELEASES)
        return false;
    __atomic_store_n(&page->tickets[written % DRAY__RELEASES], ticket, __ATOMIC_RELAXED);
    __atomic_store_n(&page->written, written + 1, __ATOMIC_SEQ_CST);
    return !(__atomic_load_n(&page->wanted, __ATOMIC_SEQ_CST) & frees);
}

uint32_t dray__releases_read(dray__releases *page, uint32_t *read, uint32_t out[DRAY__RELEASES])
{
    uint32_t written = __atomic_load_n(&page->written, __ATOMIC_SEQ_CST), count = written - *read;
    if (!count)
        return 0;
    if (count > DRAY__RELEASES) /* the client violates the protocol */
        count = DRAY__RELEASES;
    for (uint32_t i = 0; i < count; i++)
        out[i] = __atomic_load_n(&page->tickets[(written - count + i) % DRAY__RELEASES],
                                 __ATOMIC_RELAXED);
    *read = written;
    __atomic_store_n(&page->read, written, __ATOMIC_RELEASE);
    return count;
}

void dray__releases_want(dray__releases *page, uint32_t wanted)
{
    __atomic_store_n(&page->wanted, wanted, __ATOMIC_SEQ_CST);
}
