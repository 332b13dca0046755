import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  { files: ["src/**"], languageOptions: { globals: globals.browser } },
  { files: ["test/**", "*.mjs"], languageOptions: { globals: globals.node } },
  {
    rules: {
      eqeqeq: "error",
      "no-var": "error",
      "prefer-const": "error",
      complexity: ["error", 14],
      "max-lines-per-function": ["error", 60],
      // Text comes from users: it goes into the page as text only.
      "no-restricted-properties": [
        "error",
        ...["innerHTML", "outerHTML", "insertAdjacentHTML"].map((property) => ({ property })),
      ],
    },
  },
];
