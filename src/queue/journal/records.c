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
static const dray__fields state_fields = DRAY__FIELDS(
    dray__state_record,
    DRAY__NUMBERS(dray__state_record, generations, epoch, commit_seq, resumed_seq, ended),
    DRAY__FIELD_STRUCT(dray__state_record, admission, dray__admission_fields),
    DRAY__FIELD_LIST(dray__state_record, columns, column_count, known_fields),
    DRAY__FIELD_LIST(dray__state_record, cleared, cleared_count, cleared_fields),
    DRAY__NUMBERS(dray__state_record, space));

const dray__record_kind dray__record_kinds[DRAY__RECORD_KINDS] = {
    [DRAY__RECORD_OPEN] = {"OPEN", NULL, false},
    [DRAY__RECORD_START] = {"START", NULL, false},
    [DRAY__RECORD_STATE] = {"STATE", &state_fields, false},
    [DRAY__RECORD_INSERT] = {"INSERT", &insert_fields, true},
    [DRAY__RECORD_SEAL] = {"SEAL", &dray__u32_fields, false},
    [DRAY__RECORD_COMMIT] = {"COMMIT", &commit_fields, true},
    [DRAY__RECORD_LOSS] = {"LOSS", &loss_fields, false},
    [DRAY__RECORD_DECLINE] = {"DECLINE", &dray__u64_fields, false},
    [DRAY__RECORD_CLEAR] = {"CLEAR", NULL, false},
    [DRAY__RECORD_END] = {"END", NULL, false},
    [DRAY__RECORD_COVER] = {"COVER", &dray__cover_fields, false},
    [DRAY__RECORD_RESUME] = {"RESUME", &dray__cursor_fields, false},
    [DRAY__RECORD_ADMIT] = {"ADMIT", &dray__admission_fields, false},
    [DRAY__RECORD_SPACE] = {"SPACE", &dray__u64_fields, false},
};
