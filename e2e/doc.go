// Package e2e tests edge_limit from outside, with real processes: a Caddy built
// from this module, nginx, curl, and connections from several addresses of the
// loopback network. Each test starts what it needs and ends it.
package e2e
