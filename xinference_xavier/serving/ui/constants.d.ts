// `constants.js` is made by `routes.py`: what the scripts share with the server.

import type en from "./languages/en.json";

declare global {
  type Words = typeof en;
  type Language = "en" | "zh";
  type Source = "prefix_cache" | "local_pool" | "disk" | "remote" | "computed";
  type Choice = "local" | "fetch" | "compute" | "backlog" | "prefill";
  type Routing = "auto" | "backlog" | "off";
}

export const LANGUAGES: Record<Language, Words>;
export const HIT_SOURCES: Source[];
export const ROUTINGS: Routing[];
export const CHOICES: Choice[];
export const ANSWER_BOUNDS: number[];
export const BACKENDS: ("extension" | "builtin")[];
export const DEFAULT_BACKEND: string;
export const OWN_OPTIONS: string[];
export const UPSTREAM_OPTIONS: string[];
export const PAGE_PATH: string;
