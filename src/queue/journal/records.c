#include "queue/journal/records.h"

static const dray__fields column_fields =
    DRAY__FIELDS(dray__new_column, DRAY__FIELD_TEXT(dray__new_column, name, DRAY__WORD_MAX),
                 DRAY__FIELD_STRUCT(dray__new_column, spec, dray__spec_fields),
                 DRAY__NUMBERS(dray__new_column, extent.bytes));
static const dray__fields content_fields = DRAY__FIELDS(
    dray__content, DRAY__FIELD_LIST(dray__content, columns, column_count, column_fields),
    DRAY__FIELD_LIST(dray__content, keys, key_count, dray__name_fields),
    DRAY__FIELD_LIST(dray__content, tags, tag_count, dray__tag_fields));
static const dray__fields insert_fields =
    DRAY__FIELDS(dray__insert_record, DRAY__NUMBERS(dray__insert_record, identity, rows.ticket),
                 DRAY__FIELD_TEXT(dray__insert_record, rows.partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__insert_record, first, rows.rows, rows.group_size,
                               rows.per_group, rows.row_bytes, rows.refill),
                 DRAY__FIELD_STRUCT(dray__insert_record, rows.content, content_fields));
static const dray__fields row_fields =
    DRAY__FIELDS(dray__record_row, DRAY__NUMBERS(dray__record_row, slot, generation));
static const dray__fields commit_fields = DRAY__FIELDS(
    dray__commit_record, DRAY__NUMBERS(dray__commit_record, identity, ticket, task, number),
    DRAY__FIELD_LIST(dray__commit_record, rows, row_count, row_fields),
    DRAY__FIELD_STRUCT(dray__commit_record, outputs.content, content_fields),
    DRAY__FIELD_LIST(dray__commit_record, outputs.open, outputs.open_count, dray__u32_fields));
static const dray__fields loss_fields = DRAY__FIELDS(
    dray__loss_record, DRAY__NUMBERS(dray__loss_record, slot, generation, task, failures, cause),
    DRAY__FIELD_PROSE(dray__loss_record, reason, DRAY__LINES_MAX),
    DRAY__NUMBERS(dray__loss_record, demand));
static const dray__fields known_fields =
    DRAY__FIELDS(dray__known_column, DRAY__FIELD_TEXT(dray__known_column, name, DRAY__WORD_MAX),
                 DRAY__FIELD_STRUCT(dray__known_column, spec, dray__spec_fields));
static const dray__fields cleared_fields =
    DRAY__FIELDS(dray__cleared, DRAY__FIELD_TEXT(dray__cleared, name, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__cleared, finished));
static const dray__fields keyed_fields = DRAY__FIELDS(
    dray__keyed_record, DRAY__NUMBERS(dray__keyed_record, identity, put.ticket),
    DRAY__FIELD_TEXT(dray__keyed_record, put.partition, DRAY__WORD_MAX),
    DRAY__NUMBERS(dray__keyed_record, generation, put.rows),
    DRAY__FIELD_STRUCT(dray__keyed_record, put.named, dray__named_fields),
    DRAY__FIELD_LIST(dray__keyed_record, put.notes, put.note_count, dray__note_fields),
    DRAY__FIELD_LIST(dray__keyed_record, put.columns, put.column_count, column_fields));
static const dray__fields used_fields =
    DRAY__FIELDS(dray__used_record, DRAY__FIELD_TEXT(dray__used_record, task, DRAY__WORD_MAX),
                 DRAY__FIELD_STRUCT(dray__used_record, rows, dray__named_fields));
static const dray__fields kept_row_fields =
    DRAY__FIELDS(dray__image_row, DRAY__FIELD_STRUCT(dray__image_row, row, dray__got_row_fields),
                 DRAY__NUMBERS(dray__image_row, consumed));
static const dray__fields kept_fields =
    DRAY__FIELDS(dray__image, DRAY__FIELD_TEXT(dray__image, name, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray__image, generation),
                 DRAY__FIELD_LIST(dray__image, tasks, task_count, dray__name_fields),
                 DRAY__FIELD_LIST(dray__image, rows, row_count, kept_row_fields));
static const dray__fields counted_fields =
    DRAY__FIELDS(dray__counted, DRAY__NUMBERS(dray__counted, key, ticket, first_slot, generation));
const dray__fields dray__asker_fields =
    DRAY__FIELDS(dray__asker, DRAY__NUMBERS(dray__asker, identity, ticket));
static const dray__fields state_fields = DRAY__FIELDS(
    dray__state_record,
    DRAY__NUMBERS(dray__state_record, generations, epoch, commit_seq, resumed_seq, ended),
    DRAY__FIELD_STRUCT(dray__state_record, admission, dray__admission_fields),
    DRAY__FIELD_LIST(dray__state_record, columns, column_count, known_fields),
    DRAY__FIELD_LIST(dray__state_record, cleared, cleared_count, cleared_fields),
    DRAY__NUMBERS(dray__state_record, space),
    DRAY__FIELD_LIST(dray__state_record, kept, kept_count, kept_fields),
    DRAY__FIELD_LIST(dray__state_record, counted, counted_count, counted_fields));

const dray__record_kind dray__record_kinds[DRAY__RECORD_KINDS] = {
    [DRAY__RECORD_OPEN] = {"OPEN"},
    [DRAY__RECORD_START] = {"START"},
    [DRAY__RECORD_STATE] = {"STATE", &state_fields},
    [DRAY__RECORD_INSERT] = {"INSERT", &insert_fields, .bytes = true},
    [DRAY__RECORD_SEAL] = {"SEAL", &dray__u32_fields, .asked = true},
    [DRAY__RECORD_COMMIT] = {"COMMIT", &commit_fields, .bytes = true},
    [DRAY__RECORD_LOSS] = {"LOSS", &loss_fields},
    [DRAY__RECORD_DECLINE] = {"DECLINE", &dray__u64_fields, .asked = true},
    [DRAY__RECORD_CLEAR] = {"CLEAR", .asked = true},
    [DRAY__RECORD_END] = {"END"},
    [DRAY__RECORD_COVER] = {"COVER", &dray__cover_fields, .asked = true},
    [DRAY__RECORD_RESUME] = {"RESUME", &dray__cursor_fields, .asked = true},
    [DRAY__RECORD_ADMIT] = {"ADMIT", &dray__admission_fields, .asked = true},
    [DRAY__RECORD_SPACE] = {"SPACE", &dray__u64_fields},
    [DRAY__RECORD_PUT] = {"PUT", &keyed_fields, .bytes = true},
    [DRAY__RECORD_DROP] = {"DROP", &used_fields, .asked = true},
    [DRAY__RECORD_TAKE] = {"TAKE", &used_fields},
    [DRAY__RECORD_RESET] = {"RESET", &used_fields, .asked = true},
    [DRAY__RECORD_DONE] = {"DONE", .asked = true},
};
