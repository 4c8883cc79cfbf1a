package edgelimit

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// The audit reads a whole Caddy configuration as a linter does, without loading
// it: also where it uses modules that this binary does not have, and where it
// does not use edge_limit at all. What it reads it brings into one form
// (auditConfig), which the rules in audit_rules_*.go judge.

// severity says how much a finding matters.
type severity string

const (
	// severityError: somebody can do what the configuration means to prevent.
	severityError severity = "error"
	// severityWarning: it does not do what it seems to say, or gives away more.
	severityWarning severity = "warning"
	// severityNote: worth knowing; nothing needs to be done.
	severityNote severity = "note"
)

// The rules, by the names that docs/audit.md explains.
const (
	ruleRenewableKey      = "renewable-key"
	ruleBoundedKey        = "bounded-key"
	ruleKeyWriterCaller   = "key-writer-caller"
	ruleLaxClientIP       = "lax-client-ip"
	rulePeerKey           = "peer-key"
	ruleLateAuth          = "late-auth"
	ruleUnknown           = "unknown-placeholder"
	ruleLaxTrustedProxies = "lax-trusted-proxies"
	ruleTrustsEveryone    = "trusts-everyone"
	ruleUnverifiedHops    = "unverified-hops"
	ruleIdentityRead      = "identity-header-read"
	ruleIdentityWritten   = "identity-header-written"
	ruleRemoteIP          = "remote-ip-behind"
	ruleErrorRouteProxy   = "error-route-proxy"
	ruleErrorRouteStatus  = "error-route-status"
	ruleNoEdgeLimit       = "no-edge-limit"
	ruleUnusedName        = "unused-name"
	ruleIdleLimit         = "limit-never-denies"
	ruleIdleCeiling       = "ceiling-never-denies"
	ruleProxyProtocol     = "proxy-protocol-unresolved"
	ruleSecretInClear     = "secret-in-clear"
	ruleSecretInLog       = "secret-in-log"
	ruleInvalid           = "invalid"
	ruleUnsetVariable     = "unset-variable"
)

// finding is one thing that the audit has to say. None holds a secret.
type finding struct {
	// The rule, by its name in docs/audit.md.
	ID       string   `json:"id"`
	Severity severity `json:"severity"`

	spot

	// What it means, and what to do.
	Message string `json:"message"`
	Mend    string `json:"mend"`
}

// spot is where something is written: a file and a line, or a path in JSON.
type spot struct {
	File string `json:"file,omitempty"`
	Line int    `json:"line,omitempty"`
	Path string `json:"path,omitempty"`
}

func (s spot) String() string {
	switch {
	case s.Path != "" && s.File != "":
		return s.File + " " + s.Path
	case s.Path != "":
		return s.Path
	case s.Line > 0:
		return s.File + ":" + strconv.Itoa(s.Line)
	}
	return s.File
}

// in is the place of something inside, where the configuration has paths.
func (s spot) in(path string) spot {
	if s.Path != "" || s.Line == 0 {
		s.Path = joinPath(s.Path, path)
	}
	return s
}

func joinPath(path, further string) string {
	if path == "" || strings.HasPrefix(further, "[") {
		return path + further
	}
	return path + "." + further
}

// audit collects what the rules find in a configuration.
type audit struct {
	config   *auditConfig
	findings []finding
}

// auditRules are all that is judged, each on the whole configuration.
var auditRules = []func(*audit){
	(*audit).judgeEdgeKeys,
	(*audit).judgeOtherLimiters,
	(*audit).judgeLateAuth,
	(*audit).judgeServerTrust,
	(*audit).judgeEdgeTrust,
	(*audit).judgeIdentityReaders,
	(*audit).judgeIdentityWriters,
	(*audit).judgeRemoteIP,
	(*audit).judgeErrorRoutes,
	(*audit).judgeProxies,
	(*audit).judgeProxyProtocol,
	(*audit).judgeUnusedNames,
	(*audit).judgeReach,
	(*audit).judgeClearSecrets,
	(*audit).judgeLoggedSecrets,
}

// run judges a configuration. Findings come in the order of the text.
func (c *auditConfig) run() []finding {
	a := &audit{config: c, findings: slices.Clone(c.remarks)}
	for _, judge := range auditRules {
		judge(a)
	}
	// a snippet that two sites import is one text
	seen := make(map[finding]bool)
	found := slices.DeleteFunc(a.findings, func(f finding) bool {
		before := seen[f]
		seen[f] = true
		return before
	})
	slices.SortStableFunc(found, func(a, b finding) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Path, b.Path))
	})
	return found
}

func (a *audit) report(how severity, id string, at spot, mend, format string, args ...any) {
	a.findings = append(a.findings, finding{ID: id, Severity: how, spot: at, Message: fmt.Sprintf(format, args...), Mend: mend})
}

// count counts the findings of a severity.
func count(findings []finding, of severity) (n int) {
	for _, f := range findings {
		if f.Severity == of {
			n++
		}
	}
	return n
}
