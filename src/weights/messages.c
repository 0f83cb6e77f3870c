/* The tables of messages.h. */
#include "weights/messages.h"

enum { NAME_BYTES = 255, LINE_BYTES = 4096, PROSE_BYTES = 64 << 10 };

typedef struct tensor_item {
    const char *name;
} tensor_item;

const dray__fields dray__publisher_open_fields =
    DRAY__FIELDS(dray__enrolling, DRAY__FIELD_TEXT(dray__enrolling, model, NAME_BYTES),
                 DRAY__NUMBERS(dray__enrolling, rank, world, token),
                 DRAY__FIELD_TEXT(dray__enrolling, endpoint, NAME_BYTES),
                 DRAY__NUMBERS(dray__enrolling, regions, to_put, slot_bytes),
                 DRAY__FIELD_BLOB(dray__enrolling, layout, layout_size));
const dray__fields dray__publisher_claim_fields =
    DRAY__FIELDS(dray__rank_claim, DRAY__NUMBERS(dray__rank_claim, set, incarnation, published,
                                                 version, checked, readable));
const dray__fields dray__subscriber_open_fields =
    DRAY__FIELDS(dray__enrolling, DRAY__FIELD_TEXT(dray__enrolling, model, NAME_BYTES),
                 DRAY__FIELD_TEXT(dray__enrolling, group, NAME_BYTES),
                 DRAY__NUMBERS(dray__enrolling, rank, world, token),
                 DRAY__FIELD_TEXT(dray__enrolling, endpoint, NAME_BYTES),
                 DRAY__NUMBERS(dray__enrolling, regions, to_put),
                 DRAY__FIELD_BLOB(dray__enrolling, layout, layout_size));
const dray__fields dray__subscriber_claim_fields = DRAY__FIELDS(
    dray__rank_claim, DRAY__NUMBERS(dray__rank_claim, set, state, mode, version, incarnation,
                                    staged, staged_version, staged_incarnation));
const dray__fields dray__region_given_fields =
    DRAY__FIELDS(dray__region_given, DRAY__NUMBERS(dray__region_given, key, region),
                 DRAY__FIELD_BLOB(dray__region_given, handle, handle_size));
const dray__fields dray__handle_told_fields =
    DRAY__FIELDS(dray__region_given, DRAY__FIELD_BLOB(dray__region_given, handle, handle_size));
const dray__fields dray__sources_asked_fields = DRAY__FIELDS(
    dray__sources_asked, DRAY__NUMBERS(dray__sources_asked, key, what, timeout_ns, set, index));
const dray__fields dray__trainer_told_fields =
    DRAY__FIELDS(dray__trainer_told, DRAY__NUMBERS(dray__trainer_told, incarnation, set, world));
static const dray__fields member_fields = DRAY__FIELDS(
    dray__member_told, DRAY__NUMBERS(dray__member_told, key, member, host, pid, token),
    DRAY__FIELD_TEXT(dray__member_told, endpoint, NAME_BYTES),
    DRAY__NUMBERS(dray__member_told, mapped), DRAY__FIELD_TEXT(dray__member_told, name, NAME_BYTES),
    DRAY__FIELD_BLOB(dray__member_told, layout, layout_size),
    DRAY__NUMBERS(dray__member_told, regions, slot_bytes));
const dray__fields dray__members_told_fields = DRAY__FIELDS(
    dray__members_told, DRAY__FIELD_LIST(dray__members_told, items, count, member_fields));
const dray__fields dray__region_asked_fields =
    DRAY__FIELDS(dray__region_asked, DRAY__NUMBERS(dray__region_asked, key, set, index, region));
const dray__fields dray__announcing_fields =
    DRAY__FIELDS(dray__announcing, DRAY__NUMBERS(dray__announcing, key, version, checked));
const dray__fields dray__summing_fields =
    DRAY__FIELDS(dray__summing, DRAY__NUMBERS(dray__summing, key, version, code),
                 DRAY__FIELD_PROSE(dray__summing, message, PROSE_BYTES));
const dray__fields dray__draining_fields =
    DRAY__FIELDS(dray__draining, DRAY__NUMBERS(dray__draining, key, version, timeout_ns));
const dray__fields dray__drained_fields =
    DRAY__FIELDS(dray__drained, DRAY__NUMBERS(dray__drained, dropped),
                 DRAY__FIELD_TEXT(dray__drained, names, LINE_BYTES),
                 DRAY__NUMBERS(dray__drained, oldest_attempt));
const dray__fields dray__delivering_fields =
    DRAY__FIELDS(dray__delivering, DRAY__NUMBERS(dray__delivering, key, version, count),
                 DRAY__FIELD_LIST(dray__delivering, names, name_count, dray__name_fields),
                 DRAY__NUMBERS(dray__delivering, timeout_ns));
const dray__fields dray__update_wish_fields =
    DRAY__FIELDS(dray__update_wish, DRAY__NUMBERS(dray__update_wish, key, mode, min_version),
                 DRAY__FIELD_TEXT(dray__update_wish, path, LINE_BYTES),
                 DRAY__NUMBERS(dray__update_wish, path_version, verify, timeout_ns, purpose,
                               publishers_only, ready_source, ready_group));
static const dray__fields tensor_fields =
    DRAY__FIELDS(tensor_item, DRAY__FIELD_TEXT(tensor_item, name, DRAY__TENSOR_NAME_MAX));
const dray__fields dray__update_begun_fields =
    DRAY__FIELDS(dray__update_begun,
                 DRAY__NUMBERS(dray__update_begun, attempt, mode, incarnation, version, compared,
                               source_set, sources, group_set, ranks),
                 DRAY__FIELD_LIST(dray__update_begun, partial, partial_count, tensor_fields),
                 DRAY__NUMBERS(dray__update_begun, source, granted, cohort_set, cohort, run, last));
const dray__fields dray__writing_fields =
    DRAY__FIELDS(dray__writing, DRAY__NUMBERS(dray__writing, key, attempt, lease_ns));
const dray__fields dray__voting_fields = DRAY__FIELDS(
    dray__voting, DRAY__NUMBERS(dray__voting, key, attempt, code),
    DRAY__FIELD_PROSE(dray__voting, message, PROSE_BYTES), DRAY__NUMBERS(dray__voting, timeout_ns));
const dray__fields dray__committed_fields =
    DRAY__FIELDS(dray__committed, DRAY__NUMBERS(dray__committed, tensors, bytes));
const dray__fields dray__update_told_fields =
    DRAY__FIELDS(dray__update_told, DRAY__NUMBERS(dray__update_told, key),
                 DRAY__FIELD_PROSE(dray__update_told, json, PROSE_BYTES));
const dray__fields dray__group_told_fields = DRAY__FIELDS(
    dray__group_told, DRAY__NUMBERS(dray__group_told, version, incarnation, state, epoch));
const dray__fields dray__sums_asked_fields =
    DRAY__FIELDS(dray__sums_asked, DRAY__FIELD_TEXT(dray__sums_asked, model, NAME_BYTES),
                 DRAY__FIELD_TEXT(dray__sums_asked, group, NAME_BYTES));
const dray__fields dray__sums_told_fields =
    DRAY__FIELDS(dray__sums_told, DRAY__NUMBERS(dray__sums_told, version, incarnation));
const dray__fields dray__timed_fields =
    DRAY__FIELDS(dray__timed, DRAY__NUMBERS(dray__timed, key, timeout_ns));
const dray__fields dray__watching_fields =
    DRAY__FIELDS(dray__watching, DRAY__NUMBERS(dray__watching, sequence, timeout_ns));
static const dray__fields engine_fields =
    DRAY__FIELDS(dray__engine_told, DRAY__FIELD_TEXT(dray__engine_told, model, NAME_BYTES),
                 DRAY__FIELD_TEXT(dray__engine_told, group, NAME_BYTES),
                 DRAY__NUMBERS(dray__engine_told, version, incarnation, epoch, ranks, world, state,
                               serving, leaving));
const dray__fields dray__engines_told_fields =
    DRAY__FIELDS(dray__engines_told, DRAY__NUMBERS(dray__engines_told, sequence),
                 DRAY__FIELD_LIST(dray__engines_told, items, count, engine_fields));
const dray__fields dray__moving_fields =
    DRAY__FIELDS(dray__moving, DRAY__NUMBERS(dray__moving, key, token, regions, to_put),
                 DRAY__FIELD_BLOB(dray__moving, layout, layout_size));
static const dray__fields pin_fields =
    DRAY__FIELDS(dray__pin_told, DRAY__NUMBERS(dray__pin_told, member, bytes),
                 DRAY__FIELD_TEXT(dray__pin_told, name, NAME_BYTES));
const dray__fields dray__pins_told_fields =
    DRAY__FIELDS(dray__pins_told, DRAY__FIELD_LIST(dray__pins_told, items, count, pin_fields));
const dray__fields dray__set_told_fields =
    DRAY__FIELDS(dray__set_told, DRAY__NUMBERS(dray__set_told, key, set));
const dray__fields dray__sets_told_fields = DRAY__FIELDS(
    dray__sets_told, DRAY__FIELD_LIST(dray__sets_told, items, count, dray__u64_fields));
