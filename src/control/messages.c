/* The tables of messages.h. */
#include "control/messages.h"

enum { PATH_BYTES = 4096, IDENTITY_BYTES = 255 };

const dray__fields dray__spoken_fields =
    DRAY__FIELDS(dray__spoken, DRAY__NUMBERS(dray__spoken, oldest, newest));
const dray__fields dray__hello_fields =
    DRAY__FIELDS(dray__hello, DRAY__FIELD_TEXT(dray__hello, name, DRAY__NAME_MAX),
                 DRAY__FIELD_TEXT(dray__hello, role, DRAY__ROLE_MAX),
                 DRAY__NUMBERS(dray__hello, rank, host, pid));
const dray__fields dray__return_fields =
    DRAY__FIELDS(dray__session_claim, DRAY__NUMBERS(dray__session_claim, member, epoch),
                 DRAY__FIELD_BLOB(dray__session_claim, token, token_size));
const dray__fields dray__attach_fields =
    DRAY__FIELDS(dray__session_claim, DRAY__NUMBERS(dray__session_claim, member),
                 DRAY__FIELD_BLOB(dray__session_claim, token, token_size));
const dray__fields dray__hello_told_fields = DRAY__FIELDS(
    dray__hello_told, DRAY__NUMBERS(dray__hello_told, version),
    DRAY__FIELD_STRUCT(dray__hello_told, claim, dray__return_fields),
    DRAY__FIELD_TEXT(dray__hello_told, keeper, PATH_BYTES),
    DRAY__FIELD_TEXT(dray__hello_told, identity, IDENTITY_BYTES),
    DRAY__FIELD_BLOB(dray__hello_told, key, key_size), DRAY__NUMBERS(dray__hello_told, takes_back));
const dray__fields dray__meeting_fields =
    DRAY__FIELDS(dray__meeting, DRAY__FIELD_TEXT(dray__meeting, name, DRAY__NAME_MAX),
                 DRAY__NUMBERS(dray__meeting, count, timeout_ns),
                 DRAY__FIELD_LIST(dray__meeting, members, member_count, dray__u64_fields));
const dray__fields dray__met_fields = DRAY__FIELDS(
    dray__meeting, DRAY__FIELD_LIST(dray__meeting, members, member_count, dray__u64_fields));
const dray__fields dray__posting_fields =
    DRAY__FIELDS(dray__posting, DRAY__FIELD_TEXT(dray__posting, kind, DRAY__REPORT_KIND_MAX),
                 DRAY__FIELD_BLOB(dray__posting, json, size));
const dray__fields dray__report_wish_fields = DRAY__FIELDS(
    dray__report_wish, DRAY__FIELD_TEXT(dray__report_wish, kind, DRAY__REPORT_KIND_MAX),
    DRAY__NUMBERS(dray__report_wish, cursor, timeout_ns));
static const dray__fields report_fields =
    DRAY__FIELDS(dray__report_told, DRAY__FIELD_BLOB(dray__report_told, text, size));
const dray__fields dray__reports_told_fields =
    DRAY__FIELDS(dray__reports_told, DRAY__NUMBERS(dray__reports_told, cursor, lost),
                 DRAY__FIELD_LIST(dray__reports_told, items, count, report_fields));
const dray__fields dray__lease_wish_fields = DRAY__FIELDS(
    dray__lease_wish, DRAY__FIELD_LIST(dray__lease_wish, names, count, dray__name_fields),
    DRAY__NUMBERS(dray__lease_wish, timeout_ns, term_ns));
const dray__fields dray__lease_held_fields =
    DRAY__FIELDS(dray__lease_held, DRAY__NUMBERS(dray__lease_held, number, back),
                 DRAY__FIELD_LIST(dray__lease_held, names, count, dray__name_fields));
const dray__fields dray__error_told_fields =
    DRAY__FIELDS(dray__error_told, DRAY__NUMBERS(dray__error_told, code, origin, raw),
                 DRAY__FIELD_BLOB(dray__error_told, message, size));
