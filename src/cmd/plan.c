/* dray plan: the copies of an update, their members, and their time. Nothing is moved. */
#include "cmd/cmd.h"

#include <dray/plan.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The rates that are used without --rate: 8 x H200 in one host, with NVLink between GPUs, one
 * 400 Gb/s adapter a GPU and a local NVMe drive. */
static const double default_rates[DRAY_LINK_COUNT] = {
    [DRAY_LINK_PROCESS] = 1870e9, [DRAY_LINK_DEVICE] = 1870e9, [DRAY_LINK_HOST] = 397e9,
    [DRAY_LINK_NETWORK] = 50e9,   [DRAY_LINK_FILE] = 2.9e9,
};

typedef struct arguments {
    const char *model, *from, *to;
    int place; /* index of `places` */
    int64_t rank;
    bool json, copies;
    double rates[DRAY_LINK_COUNT]; /* bytes/s */
} arguments;

static const char *const places[] = {"host", "network", "device", "process", NULL};
enum { MOST_COLUMNS = 12, MOST_ROWS = 40 };

/* Both sides as the planner sees them, and the plans. */
typedef struct update {
    dray_layout **layouts[2]; /* from, to */
    uint32_t counts[2];
    dray_plan_member *members[2];
    dray_plan **plans; /* one for each destination; NULL when --rank leaves it out */
    /* Bytes at the destination; the index is source · destinations + destination. */
    uint64_t *pairs;
    uint64_t links[DRAY_LINK_COUNT];
    uint64_t bytes, source_bytes, copies, transforms, largest;
    double layout_seconds, plan_seconds;
    double predicted; /* seconds */
    int busiest_side; /* the member that needs the longest */
    uint32_t busiest;
    uint64_t busiest_bytes;
} update;

/* ---- arguments ------------------------------------------------------------------------------- */

static void put_rate(const struct argp_state *state, const cmd_option *option, void *to,
                     const char *text)
{
    (void)option;
    arguments *a = to;
    const char *equals = strchr(text, '=');
    char *end;
    double rate = strtod(equals ? equals + 1 : text, &end);
    if (end == (equals ? equals + 1 : text) || *end || !(rate > 0) || rate > 1e9)
        argp_error(state, "--rate: expected [LINK=]GB/s, found '%s'", text);
    const char *names[DRAY_LINK_COUNT];
    char name[32];
    snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - text) : 0, text);
    bool known = !equals;
    for (int l = 0; l < DRAY_LINK_COUNT; l++) {
        names[l] = dray_link_name((dray_link)l);
        if (equals && strcmp(names[l], name) != 0)
            continue;
        known = true;
        a->rates[l] = rate * 1e9;
    }
    if (!known)
        cmd_bad_word(state, "link", name, names, DRAY_LINK_COUNT);
}

static bool is_checkpoint(const char *spec)
{
    return strncmp(spec, "safetensors:", strlen("safetensors:")) == 0;
}

static void check(const struct argp_state *state, const void *to)
{
    const arguments *a = to;
    if (!a->from || !a->to)
        argp_error(state, "expected --from SPEC and --to SPEC");
    else if (!a->model && !(is_checkpoint(a->from) && is_checkpoint(a->to)))
        argp_error(state, "expected --model NAME or config.json: only safetensors:DIR says its "
                          "own shapes");
}

/* ---- both sides ------------------------------------------------------------------------------ */

static int make_layouts(const arguments *a, update *u, dray_error *error)
{
    dray_model_config config;
    const dray_model_config *model = NULL;
    const char *specs[2] = {a->from, a->to};
    int rc = DRAY_OK;
    int64_t begin = cmd_now();
    if (a->model) {
        rc = dray_model_config_load(a->model, &config, error);
        model = &config;
    }
    for (int side = 0; !rc && side < 2; side++)
        rc = dray_layouts_from_spec(model, specs[side], &u->layouts[side], &u->counts[side], error);
    u->layout_seconds = (double)(cmd_now() - begin) * 1e-9;
    return rc;
}

/* Places the members as --place says: rank i of both sides on GPU i + 1, or on different GPUs. */
static void place_member(const arguments *a, int side, uint32_t rank, dray_plan_member *m)
{
    const char *place = places[a->place];
    bool together = strcmp(place, "device") == 0 || strcmp(place, "process") == 0;
    m->member = (uint64_t)rank + (side ? 1u << 20 : 0);
    m->host = side && strcmp(place, "network") == 0 ? 2 : 1;
    m->process = strcmp(place, "process") == 0 ? rank : m->member;
    m->device = 1 + (together ? rank : m->member);
}

static bool make_members(const arguments *a, update *u, char (**names)[24])
{
    *names = calloc((size_t)u->counts[0] + u->counts[1], sizeof **names);
    for (int side = 0; side < 2; side++)
        u->members[side] = calloc(u->counts[side], sizeof *u->members[side]);
    u->plans = calloc(u->counts[1], sizeof *u->plans);
    u->pairs = calloc((size_t)u->counts[0] * u->counts[1], sizeof *u->pairs);
    if (!*names || !u->members[0] || !u->members[1] || !u->plans || !u->pairs)
        return false;
    for (int side = 0; side < 2; side++)
        for (uint32_t i = 0; i < u->counts[side]; i++) {
            char *name = (*names)[side * (int)u->counts[0] + (int)i];
            snprintf(name, sizeof **names, "%s %u", side ? "to" : "from", i);
            u->members[side][i].layout = u->layouts[side][i];
            u->members[side][i].name = name;
            place_member(a, side, i, &u->members[side][i]);
        }
    return true;
}

/* ---- planning -------------------------------------------------------------------------------- */

static bool wanted(const arguments *a, uint32_t destination)
{
    return a->rank < 0 || (uint64_t)a->rank == destination;
}

static int make_plans(const arguments *a, update *u, dray_error *error)
{
    dray_plan_index *index;
    int64_t begin = cmd_now();
    int rc = DRAY_OK;
    if (a->rank >= 0) {
        rc = dray_plan_new(u->members[0], u->counts[0], &u->members[1][a->rank], NULL,
                           &u->plans[a->rank], error);
    } else {
        rc = dray_plan_index_new(u->members[0], u->counts[0], &index, error);
        if (rc)
            return rc;
        for (uint32_t d = 0; !rc && d < u->counts[1]; d++)
            rc = dray_plan_from_index(index, &u->members[1][d], NULL, &u->plans[d], error);
        dray_plan_index_free(index);
    }
    u->plan_seconds = (double)(cmd_now() - begin) * 1e-9;
    return rc;
}

static uint64_t copy_elements(const dray_copy *copy)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < copy->ndim; d++)
        n *= (uint64_t)copy->extent[d];
    return n;
}

static void add_plan(update *u, uint32_t d)
{
    const dray_plan *plan = u->plans[d];
    const dray_copy *copies = dray_plan_copies(plan);
    for (uint64_t i = 0; i < dray_plan_count(plan); i++)
        u->pairs[(size_t)copies[i].source * u->counts[1] + d] +=
            copy_elements(&copies[i]) * dray_dtype_size((dray_dtype)copies[i].destination_dtype);
    const dray_transform *t = dray_plan_transforms(plan);
    const dray_copy *reads = dray_plan_reads(plan);
    /* The source's elements are read in their own form. */
    for (uint64_t i = 0; i < dray_plan_transform_count(plan); i++)
        for (uint64_t r = 0; r < t[i].reads; r++) {
            const dray_copy *read = &reads[t[i].first_read + r];
            u->pairs[(size_t)read->source * u->counts[1] + d] +=
                copy_elements(read) * dray_dtype_size((dray_dtype)read->source_dtype);
        }
    u->transforms += dray_plan_transform_count(plan);
    for (int l = 0; l < DRAY_LINK_COUNT; l++)
        u->links[l] += dray_plan_bytes(plan, (dray_link)l);
    for (uint32_t s = 0; s < u->counts[0]; s++)
        u->source_bytes += dray_plan_source_bytes(plan, s);
    u->bytes += dray_plan_total_bytes(plan);
    u->copies += dray_plan_count(plan);
    if (dray_plan_largest_copy(plan) > u->largest)
        u->largest = dray_plan_largest_copy(plan);
}

/* Returns the member that takes longest to send or to receive its bytes, with every link at its
 * rate. */
static void predict(const arguments *a, update *u)
{
    for (int side = 0; side < 2; side++)
        for (uint32_t i = 0; i < u->counts[side]; i++) {
            double seconds = 0;
            uint64_t bytes = 0;
            for (uint32_t j = 0; j < u->counts[!side]; j++) {
                uint32_t s = side ? j : i, d = side ? i : j;
                uint64_t pair = u->pairs[(size_t)s * u->counts[1] + d];
                if (!pair)
                    continue;
                seconds += (double)pair / a->rates[dray_plan_source_link(u->plans[d], s)];
                bytes += pair;
            }
            if (seconds > u->predicted) {
                u->predicted = seconds;
                u->busiest_side = side;
                u->busiest = i;
                u->busiest_bytes = bytes;
            }
        }
}

/* ---- output ---------------------------------------------------------------------------------- */

static void print_pairs(const arguments *a, const update *u)
{
    const char *headings[MOST_COLUMNS + 4] = {"from \\ to"};
    char titles[MOST_COLUMNS + 1][24];
    size_t columns = 1;
    for (uint32_t d = 0; d < u->counts[1]; d++)
        if (wanted(a, d)) {
            snprintf(titles[columns], sizeof *titles, ">%u", d);
            headings[columns] = titles[columns];
            columns++;
        }
    headings[columns] = ">sent";
    cmd_table *table = cmd_table_new(headings);
    for (uint32_t s = 0; s < u->counts[0]; s++) {
        uint64_t sent = 0;
        cmd_cell(table, "%u", s);
        for (uint32_t d = 0; d < u->counts[1]; d++)
            if (wanted(a, d)) {
                uint64_t bytes = u->pairs[(size_t)s * u->counts[1] + d];
                sent += bytes;
                cmd_cell(table, "%s", bytes ? dray__say_bytes((double)bytes).s : "-");
            }
        cmd_cell(table, "%s", dray__say_bytes((double)sent).s);
    }
    cmd_cell(table, "received");
    for (uint32_t d = 0; d < u->counts[1]; d++)
        if (wanted(a, d))
            cmd_cell(table, "%s", dray__say_bytes((double)dray_plan_total_bytes(u->plans[d])).s);
    cmd_cell(table, "%s", dray__say_bytes((double)u->bytes).s);
    cmd_table_print(table, stdout);
}

/* There are too many columns for a screen, so only the range of the pairs is printed. */
static void print_pair_range(const update *u)
{
    uint64_t used = 0, least = UINT64_MAX, most = 0;
    for (size_t i = 0; i < (size_t)u->counts[0] * u->counts[1]; i++) {
        used += u->pairs[i] > 0;
        most = u->pairs[i] > most ? u->pairs[i] : most;
        least = u->pairs[i] && u->pairs[i] < least ? u->pairs[i] : least;
    }
    printf("%llu of %llu pairs move %s to %s each (--rank R shows one receiver, --json all)\n",
           (unsigned long long)used, (unsigned long long)u->counts[0] * u->counts[1],
           dray__say_bytes(used ? (double)least : 0).s, dray__say_bytes((double)most).s);
}

static void print_copies(const update *u)
{
    static const char *const headings[] = {"from", "to", "tensor", "elements", ">bytes", NULL};
    cmd_table *table = cmd_table_new(headings);
    for (uint32_t d = 0; d < u->counts[1]; d++) {
        const dray_copy *copies = u->plans[d] ? dray_plan_copies(u->plans[d]) : NULL;
        uint64_t count = u->plans[d] ? dray_plan_count(u->plans[d]) : 0;
        for (uint64_t i = 0; i < count; i++) {
            const dray_copy *c = &copies[i];
            char range[160] = "";
            for (uint32_t k = 0, at = 0; k < c->ndim; k++)
                at += (uint32_t)snprintf(range + at, sizeof range - at, "%s%" PRId64 ":%" PRId64,
                                         k ? ", " : "", c->start[k], c->start[k] + c->extent[k]);
            cmd_cell(table, "%u", c->source);
            cmd_cell(table, "%u", d);
            cmd_cell(table, "%s", dray_layout_tensor(u->layouts[1][d], c->tensor)->name);
            cmd_cell(table, "[%s]", range);
            cmd_cell(table, "%" PRIu64,
                     copy_elements(c) * dray_dtype_size((dray_dtype)c->destination_dtype));
        }
    }
    cmd_table_print(table, stdout);
}

static void print_people(const arguments *a, const update *u)
{
    printf("%s%s%s -> %s\n", a->model ? a->model : "", a->model ? ": " : "", a->from, a->to);
    printf("moves      %s in %llu copies, the largest %s\n", dray__say_bytes((double)u->bytes).s,
           (unsigned long long)u->copies, dray__say_bytes((double)u->largest).s);
    if (u->transforms)
        printf("quantises  %llu boxes of whole cells, or makes floats of them\n",
               (unsigned long long)u->transforms);
    if (u->source_bytes != u->bytes)
        printf("converts   %s read become %s written\n", dray__say_bytes((double)u->source_bytes).s,
               dray__say_bytes((double)u->bytes).s);
    for (int l = 0; l < DRAY_LINK_COUNT; l++)
        if (u->links[l])
            printf("           %s over %s links\n", dray__say_bytes((double)u->links[l]).s,
                   dray_link_name((dray_link)l));
    printf("takes      %s", dray__say_seconds(u->predicted).s);
    if (u->bytes)
        printf(": '%s %u' %s %s", u->busiest_side ? "to" : "from", u->busiest,
               u->busiest_side ? "receives" : "sends", dray__say_bytes((double)u->busiest_bytes).s);
    for (int l = 0, first = 1; l < DRAY_LINK_COUNT; l++)
        if (u->links[l]) {
            printf("%s %s %s/s", first ? "; assumed a member:" : ",", dray_link_name((dray_link)l),
                   dray__say_bytes(a->rates[l]).s);
            first = 0;
        }
    printf("\nplanned in %s (layouts %s)\n\n", dray__say_seconds(u->plan_seconds).s,
           dray__say_seconds(u->layout_seconds).s);
    if (a->copies)
        print_copies(u);
    else if (a->rank >= 0 || (u->counts[1] <= MOST_COLUMNS && u->counts[0] <= MOST_ROWS))
        print_pairs(a, u);
    else
        print_pair_range(u);
}

static json_t *links_json(const arguments *a, const update *u)
{
    json_t *links = json_object();
    for (int l = 0; l < DRAY_LINK_COUNT; l++)
        if (u->links[l])
            json_object_set_new(links, dray_link_name((dray_link)l),
                                json_pack("{s:I, s:f}", "bytes", (json_int_t)u->links[l],
                                          "assumed_bytes_per_s", a->rates[l]));
    return links;
}

static json_t *pairs_json(const update *u)
{
    json_t *pairs = json_array();
    for (uint32_t s = 0; s < u->counts[0]; s++)
        for (uint32_t d = 0; d < u->counts[1]; d++) {
            uint64_t bytes = u->pairs[(size_t)s * u->counts[1] + d];
            if (bytes)
                json_array_append_new(pairs,
                                      json_pack("{s:I, s:I, s:I}", "from", (json_int_t)s, "to",
                                                (json_int_t)d, "bytes", (json_int_t)bytes));
        }
    return pairs;
}

static void print_json(const arguments *a, const update *u)
{
    cmd_json_line(json_pack(
        "{s:s?, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:f, s:f, s:f, s:o}", "model",
        a->model, "from", a->from, "to", a->to, "sources", (json_int_t)u->counts[0], "destinations",
        (json_int_t)u->counts[1], "bytes", (json_int_t)u->bytes, "source_bytes",
        (json_int_t)u->source_bytes, "copies", (json_int_t)u->copies, "transforms",
        (json_int_t)u->transforms, "largest_copy", (json_int_t)u->largest, "links",
        links_json(a, u), "predicted_seconds", u->predicted, "plan_seconds", u->plan_seconds,
        "layout_seconds", u->layout_seconds, "pairs", pairs_json(u)));
}

/* ---- the command ----------------------------------------------------------------------------- */

static void update_free(update *u)
{
    for (uint32_t d = 0; u->plans && d < u->counts[1]; d++)
        dray_plan_free(u->plans[d]);
    for (int side = 0; side < 2; side++) {
        for (uint32_t i = 0; u->layouts[side] && i < u->counts[side]; i++)
            dray_layout_free(u->layouts[side][i]);
        free(u->layouts[side]);
        free(u->members[side]);
    }
    free(u->plans);
    free(u->pairs);
}

static int run(const arguments *a, update *u, char (**names)[24])
{
    dray_error error;
    if (make_layouts(a, u, &error))
        return cmd_refuse("plan", &error);
    if (a->rank >= (int64_t)u->counts[1])
        return cmd_failf("plan", "--rank %lld: '%s' has %u ranks", (long long)a->rank, a->to,
                         u->counts[1]),
               CMD_USAGE;
    if (!make_members(a, u, names))
        return cmd_failf("plan", "out of memory");
    if (make_plans(a, u, &error))
        return cmd_fail("plan", &error);
    for (uint32_t d = 0; d < u->counts[1]; d++)
        if (u->plans[d])
            add_plan(u, d);
    predict(a, u);
    if (a->json)
        print_json(a, u);
    else
        print_people(a, u);
    return CMD_OK;
}

int cmd_plan(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_TEXT(arguments, model, "model", 'm', "NAME",
                 "Shapes of this model: a name (qwen2.5-32b) or a config.json"),
        CMD_TEXT(arguments, from, "from", 'f', "SPEC",
                 "Placement of the sources: fsdp:4, full, safetensors:DIR"),
        CMD_TEXT(arguments, to, "to", 't', "SPEC", "Placement of the receivers: engine:tp=4, full"),
        CMD_NUMBER(arguments, rank, "rank", 'r', 0, UINT32_MAX, "R",
                   "Only what rank R of --to receives"),
        CMD_WORD(arguments, place, "place", 'p', places, "place", "WORD",
                 "Where the two sides are: on one host with a GPU each (host, the default), on "
                 "different hosts (network), rank by rank on the same GPU (device) or in one "
                 "process (process)"),
        CMD_CALL(put_rate, "rate", 'R', "[LINK=]GB/s",
                 "Rate of a member over process, device, host, network or file links, for the "
                 "predicted time; without LINK, of all (default: 8 x H200 with NVLink, 400 Gb/s a "
                 "GPU, NVMe)"),
        CMD_FLAG(arguments, copies, "copies", 'c', "List every copy"),
        CMD_FLAG(arguments, json, "json", 'j', "One JSON object"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .check = check,
        .doc = "Says what a weight update would move: bytes in all and for each pair of members, "
               "over which links, in how many copies, and how long it would take. Nothing is "
               "moved.\vExample: dray plan --model qwen2.5-32b --from fsdp:4 --to engine:tp=4"};
    arguments a = {.rank = -1};
    memcpy(a.rates, default_rates, sizeof a.rates);
    cmd_parse(&usage, argc, argv, &a);
    update u = {0};
    char(*names)[24] = NULL;
    int status = run(&a, &u, &names);
    update_free(&u);
    free(names);
    return status;
}
