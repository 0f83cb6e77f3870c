/* Roles and tasks of a job file: the defaults that depend on each other, and the checks. */
#pragma once

#include "run/job/settings.h"

/* Fills in the settings that follow from a role's tasks: on_death, and the grader of
 * evaluations. */
int dray__roles_settle(dray__job *job, const dray__places *at, dray_error *error);
/* Rules (job_load.c). */
int dray__rule_roles(const dray__job *job, const dray__places *at, dray_error *error);
int dray__rule_programs(const dray__job *job, const dray__places *at, dray_error *error);
int dray__rule_tasks(const dray__job *job, const dray__places *at, dray_error *error);
int dray__rule_columns(const dray__job *job, const dray__places *at, dray_error *error);

/* Checks that the role's command, folder and devices exist on this host. */
int dray__role_there(const dray__job_role *role, const dray__places *at, dray_error *error);
/* The same for all roles that a run is about to start on this host. */
int dray__rule_there(const dray__job *job, const dray__places *at, dray_error *error);
