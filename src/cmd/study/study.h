/* src/cmd/study/: `dray study`.
 *
 * How the result of a study (study.json) is shown: tables for a terminal, a page with pictures. */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* The tables, as text or as HTML; then the runs that failed or diverged. */
void cmd_study_tables(const json_t *study, bool html, FILE *out);
/* Held-out accuracy by samples or by wall time, a line and a band a schedule: an SVG element. */
void cmd_study_plot(const json_t *study, bool by_seconds, FILE *out);
/* A page that needs no other file. */
void cmd_study_page(const json_t *study, FILE *out);
/* Text between tags or in an attribute. */
void cmd_study_escape(const char *text, FILE *out);
