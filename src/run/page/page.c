#include "run/page/page.h"

#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "run/page/embedded.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The text in page.html that the data replace. */
static const char mark[] = "\"DATA\"";

/* The limits of a run's data, so that several runs fit on one page. */
enum { POINTS = 5000, INTERVALS = 120000, BYTES_MOST = 1900000, POINTS_LEAST = 200 };

/* With intervals 0 it leaves out timelines, because reading that of a live run would take long. */
static int collect(const char *const *folders, uint32_t count, uint32_t points, uint32_t intervals,
                   json_t **out, dray_error *error)
{
    json_t *runs = json_array();
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++) {
        json_t *run = NULL, *timeline = NULL;
        rc = dray__page_run(folders[i], points, &run, error);
        if (!rc && intervals)
            rc = dray__page_timeline(folders[i], intervals / count, &timeline, error);
        if (!rc && timeline)
            dray__json_set(&run, "timeline", timeline);
        if (!rc)
            dray__json_append(&runs, run);
        else
            json_decref(run);
    }
    if (!rc && !runs)
        rc = dray__nomem(error);
    if (rc)
        json_decref(runs);
    else
        *out = runs;
    return rc;
}

/* Makes a text that a script element may contain, which "</script>" must not occur in, nor "<!--",
 * behind which "<script" would keep the element open beyond its end (HTML, "Restrictions for
 * contents of script elements"). */
static char *text_of(json_t *runs, bool live)
{
    json_t *all = json_pack("{s:s, s:b, s:O}", "dray", dray_version(), "live", live, "runs", runs);
    char *text = dray__json_text(all, JSON_COMPACT | JSON_REAL_PRECISION(9) | JSON_ENSURE_ASCII);
    json_decref(all);
    if (!text)
        return NULL;
    for (char *at = text; (at = strchr(at, '<'));)
        *at = '\x01'; /* a byte that no JSON text has; written below as \u003c */
    return text;
}

static void print(const char *text, FILE *out)
{
    for (const char *at; (at = strchr(text, '\x01')); text = at + 1) {
        fwrite(text, 1, (size_t)(at - text), out);
        fputs("\\u003c", out);
    }
    fputs(text, out);
}

int dray__page_write(const char *const *folders, uint32_t count, bool live, FILE *out,
                     dray_error *error)
{
    const char *page = (const char *)dray__page_html, *at = strstr(page, mark);
    uint32_t points = POINTS, intervals = live ? 0 : INTERVALS;
    char *text = NULL;
    int rc = at ? DRAY_OK : dray__fail(error, DRAY_EINTERNAL, "page.html has no place for data");
    while (!rc) {
        json_t *runs = NULL;
        free(text);
        text = NULL;
        rc = collect(folders, count, points, intervals, &runs, error);
        if (!rc && !(text = text_of(runs, live)))
            rc = dray__nomem(error);
        json_decref(runs);
        if (rc || strlen(text) + dray__page_html_size < BYTES_MOST || points <= POINTS_LEAST)
            break;
        points /= 2;
        intervals /= 2;
    }
    if (!rc) {
        fwrite(page, 1, (size_t)(at - page), out);
        print(text, out);
        fputs(at + strlen(mark), out);
        if (ferror(out))
            rc = dray__fail_errno(error, errno, "the page");
    }
    free(text);
    return rc;
}

/* Writes the page beside its place, under a name of this process, because a run that ends and `dray
 * report` may write the same page at once. */
int dray__page_write_file(const char *const *folders, uint32_t count, const char *path,
                          dray_error *error)
{
    char *own;
    if (asprintf(&own, "%s.%ld.tmp", path, (long)getpid()) < 0)
        return dray__nomem(error);
    FILE *out = dray__open_stream(own, "w");
    int rc = out ? dray__page_write(folders, count, false, out, error)
                 : dray__fail_errno(error, errno, "%s", path);
    if (!rc && (fflush(out) || fsync(fileno(out))))
        rc = dray__fail_errno(error, errno, "%s", path);
    if (out && fclose(out) && !rc)
        rc = dray__fail_errno(error, errno, "%s", path);
    if (!rc && rename(own, path) < 0)
        rc = dray__fail_errno(error, errno, "%s", path);
    if (rc && out)
        unlink(own);
    free(own);
    return rc;
}
